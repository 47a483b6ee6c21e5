"""How to read what is asked of a model, and how to answer it, in each dialect of providers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conformance.providers import chat, messages, responses
from conformance.providers.server import DONE, Reply, Sleep, Step
from conformance.toolbox import Tool

__all__ = ["Dialect", "dialect_of"]


class Dialect:
    """How to read a request, and how to answer it."""

    def turns(self, request: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return who said what: roles are user, tool and others."""
        raise NotImplementedError

    def tools(self, request: Mapping[str, Any]) -> list[Tool]:
        """Return what the agent offers."""
        raise NotImplementedError

    def problems(self, request: Mapping[str, Any]) -> list[str]:
        """Return what every provider would refuse in the history."""
        raise NotImplementedError

    def begins(self) -> bytes:
        """Return the first event of an answer."""
        raise NotImplementedError

    def says(self, pieces: Sequence[str], *, every_s: float = 0.0) -> Reply:
        """Return an answer of text."""
        raise NotImplementedError

    def calls(self, name: str, arguments: str, call_id: str) -> Reply:
        """Return an answer that calls a tool."""
        raise NotImplementedError

    def refuses(self) -> Reply:
        """Return a refusal."""
        raise NotImplementedError


class _Chat(Dialect):
    def turns(self, request: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [(each.get("role", ""), _text(each.get("content"))) for each in request["messages"]]

    def tools(self, request: Mapping[str, Any]) -> list[Tool]:
        functions = [each.get("function", {}) for each in request.get("tools") or ()]
        return [Tool(each.get("name", ""), each.get("parameters") or {}) for each in functions]

    def problems(self, request: Mapping[str, Any]) -> list[str]:
        return chat.history_violations(request["messages"])

    def begins(self) -> bytes:
        return chat.chunk({"role": "assistant", "content": ""})

    def says(self, pieces: Sequence[str], *, every_s: float = 0.0) -> Reply:
        end = [chat.finish("stop"), chat.usage(10, 5), DONE]
        return _reply(self.begins(), [chat.text(each) for each in pieces], end, every_s)

    def calls(self, name: str, arguments: str, call_id: str) -> Reply:
        call = [chat.tool_call(0, call_id, name), chat.tool_call(0, arguments=arguments)]
        return _reply(self.begins(), call, [chat.finish("tool_calls"), chat.usage(10, 5), DONE])

    def refuses(self) -> Reply:
        refusal = chat.chunk({"refusal": "I cannot help with that."})
        return _reply(self.begins(), [refusal], [chat.finish("content_filter"), DONE])


class _Responses(Dialect):
    def turns(self, request: Mapping[str, Any]) -> list[tuple[str, str]]:
        items = request.get("input")
        if isinstance(items, str):
            return [("user", items)]
        return [
            ("tool", "")
            if each.get("type") == "function_call_output"
            else (each.get("role", ""), _text(each.get("content")))
            for each in items or ()
        ]

    def tools(self, request: Mapping[str, Any]) -> list[Tool]:
        return [
            Tool(each.get("name", ""), each.get("parameters") or {})
            for each in request.get("tools") or ()
            if each.get("type") == "function"
        ]

    def problems(self, request: Mapping[str, Any]) -> list[str]:
        return responses.history_violations(request)

    def begins(self) -> bytes:
        return responses.created()

    def says(self, pieces: Sequence[str], *, every_s: float = 0.0) -> Reply:
        end = [
            responses.item_done(0, responses.message_item("msg_0", "".join(pieces))),
            responses.completed(responses.usage(10, 5)),
        ]
        added = responses.item_added(0, responses.message_item("msg_0"))
        texts = [responses.text(each) for each in pieces]
        return _reply(self.begins(), [added, *texts], end, every_s)

    def calls(self, name: str, arguments: str, call_id: str) -> Reply:
        begun = responses.item_added(0, responses.call_item(call_id, name))
        done = responses.item_done(0, responses.call_item(call_id, name, arguments))
        end = [responses.completed(responses.usage(10, 5))]
        return _reply(self.begins(), [begun, responses.arguments(arguments), done], end)

    def refuses(self) -> Reply:
        end = [responses.completed(responses.usage(10, 5))]
        return _reply(self.begins(), [responses.refusal("I cannot help with that.")], end)


class _Messages(Dialect):
    def turns(self, request: Mapping[str, Any]) -> list[tuple[str, str]]:
        turns: list[tuple[str, str]] = []
        for each in request["messages"]:
            content = each.get("content")
            blocks = content if isinstance(content, list) else []
            results = [block for block in blocks if block.get("type") == "tool_result"]
            turns += [("tool", "")] * len(results)
            turns.append((each.get("role", ""), _text(content)))
        return turns

    def tools(self, request: Mapping[str, Any]) -> list[Tool]:
        return [
            Tool(each.get("name", ""), each.get("input_schema") or {})
            for each in request.get("tools") or ()
        ]

    def problems(self, request: Mapping[str, Any]) -> list[str]:
        return messages.history_violations(request)

    def begins(self) -> bytes:
        return messages.start()

    def says(self, pieces: Sequence[str], *, every_s: float = 0.0) -> Reply:
        first, *deltas, last = messages.text(0, *pieces)
        end = [last, messages.delta_end(), messages.stop()]
        return _reply(self.begins(), [first, *deltas], end, every_s)

    def calls(self, name: str, arguments: str, call_id: str) -> Reply:
        block = messages.tool_use(0, name, arguments, id=f"toolu_{call_id}")
        return _reply(self.begins(), block, [messages.delta_end("tool_use"), messages.stop()])

    def refuses(self) -> Reply:
        return _reply(self.begins(), [], [messages.delta_end("refusal"), messages.stop()])


def dialect_of(path: str) -> Dialect | None:
    """Return what is spoken at a path, or `None` if no model is."""
    spoken = {"messages": _Messages, "responses": _Responses, "completions": _Chat}
    dialect = spoken.get(path.rpartition("/")[2])
    return None if dialect is None else dialect()


def _reply(
    begins: bytes, middle: Sequence[bytes], end: Sequence[bytes], every_s: float = 0.0
) -> Reply:
    steps: list[Step] = [begins]
    for each in middle:
        steps.append(each)
        if every_s:
            steps.append(Sleep(every_s))
    return Reply([*steps, *end])


def _text(content: object) -> str:
    """Return the text in the content of a message, of whatever form."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join(str(each.get("text", "")) for each in content if isinstance(each, dict))
