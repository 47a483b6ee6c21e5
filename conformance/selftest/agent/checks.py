"""What params must be. Whatever is wrong raises an `RpcError` that names the place."""

from __future__ import annotations

from typing import Any, Final

from conformance.selftest.agent.rpc import INVALID_PARAMS, Message, RpcError

__all__ = [
    "PROMPT_CAPABILITIES",
    "absolute",
    "absolutes",
    "blocks",
    "fields",
    "invalid",
    "mcp_servers",
    "string",
]

PROMPT_CAPABILITIES: Final = {"image": True, "audio": False, "embeddedContext": True}

_BLOCKS: Final[dict[str, tuple[str, ...]]] = {
    "text": ("text",),
    "image": ("data", "mimeType"),
    "audio": ("data", "mimeType"),
    "resource_link": ("uri", "name"),
    "resource": (),
}
_SHOWN: Final = ("type", "text", "data", "mimeType", "uri", "name", "title", "description")
_RESOURCE: Final = ("uri", "mimeType", "text", "blob")
_NEEDS: Final = {"image": "image", "audio": "audio", "resource": "embeddedContext"}


def invalid(path: str, problem: str) -> RpcError:
    """Return the error that says what is wrong where."""
    return RpcError(INVALID_PARAMS, f"{path}: {problem}", {"path": path})


def fields(value: object, path: str = "params") -> Message:
    """Return `value` if it is an object."""
    if not isinstance(value, dict):
        raise invalid(path, "must be an object")
    return value


def string(value: Message, key: str, path: str = "") -> str:
    """Return the member `key` if it is a string."""
    found = value.get(key)
    if not isinstance(found, str):
        raise invalid(path + key, "must be a string")
    return found


def absolute(value: Message, key: str) -> str:
    """Return the member `key` if it is an absolute path."""
    path = string(value, key)
    if not path.startswith("/") or "\0" in path:
        raise invalid(key, "must be an absolute path")
    return path


def absolutes(value: Message, key: str) -> list[str]:
    """Return the member `key` if it is a list of absolute paths; none if there is none."""
    return [absolute({key: path}, key) for path in _items(value, key)]


def mcp_servers(value: Message, *, is_required: bool) -> list[Message]:
    """Return the MCP servers to start: those that are reached by stdio, the only ones we take."""
    if is_required and "mcpServers" not in value:
        raise invalid("mcpServers", "is missing")
    return [_mcp_server(server) for server in _items(value, "mcpServers")]


def blocks(value: Message, key: str = "prompt") -> list[Message]:
    """Return the content blocks of a prompt, at least one, without what is not known here."""
    if not isinstance(value.get(key), list) or not value[key]:
        raise invalid(key, "must be a list with something in it")
    return [_block(block, f"{key}/{index}/") for index, block in enumerate(value[key])]


def _items(value: Message, key: str) -> list[Any]:
    items = value.get(key)
    if items is None:
        return []
    if not isinstance(items, list):
        raise invalid(key, "must be a list")
    return items


def _block(value: object, path: str) -> Message:
    block = fields(value, path)
    kind = string(block, "type", path)
    if kind not in _BLOCKS:
        raise invalid(f"{path}type", "is no kind of content that is known here")
    if kind in _NEEDS and not PROMPT_CAPABILITIES[_NEEDS[kind]]:
        raise invalid(f"{path}type", "is a kind of content that was not offered")
    for key in _BLOCKS[kind]:
        string(block, key, path)
    if kind == "resource":
        resource = fields(block.get("resource"), f"{path}resource")
        string(resource, "uri", f"{path}resource/")
        string(resource, "blob" if "blob" in resource else "text", f"{path}resource/")
        shown = {key: resource[key] for key in _RESOURCE if isinstance(resource.get(key), str)}
        return {"type": kind, "resource": shown}
    return {key: block[key] for key in _SHOWN if isinstance(block.get(key), str)}


def _mcp_server(value: object) -> Message:
    server = fields(value, "mcpServers")
    if server.get("type", "stdio") != "stdio":
        raise invalid("mcpServers", "this way to reach a server was not offered")
    for key in ("name", "command"):
        string(server, key, "mcpServers/")
    if not all(isinstance(each, str) for each in _items(server, "args")):
        raise invalid("mcpServers/args", "must be strings")
    for variable in _items(server, "env"):
        for key in ("name", "value"):
            string(fields(variable, "mcpServers/env"), key, "mcpServers/env/")
    return server
