"""The `ask` tool: one question to the person, and their answer."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

import msgspec
from msgspec import Meta, Struct

from agent_core.content import ToolKind
from agent_core.errors import ToolError
from agent_core.forms import Form, Property
from agent_core.questions import ask
from agent_core.text import shortened
from agent_core.tools.roots import Roots
from agent_core.tools.tool import Effect, Tool, ToolContext, ToolOutput, ToolView

__all__ = ["AskPerson"]

ANSWER: Final = "answer"
MAX_TITLE_CHARS: Final = 80
MAX_ANSWER_CHARS: Final = 10_000

_Choices = Annotated[
    tuple[Annotated[str, Meta(min_length=1, max_length=200)], ...], Meta(max_length=50)
]


class _Field(Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
    kind: Literal["text", "number", "boolean", "choice"] = "text"
    title: Annotated[str, Meta(max_length=200, description="What people see for it.")] = ""
    choices: Annotated[_Choices, Meta(description="For the kind choice only.")] = ()
    is_required: bool = True


class _Args(Struct, frozen=True, forbid_unknown_fields=True):
    question: Annotated[str, Meta(min_length=1, max_length=2000)]
    choices: Annotated[
        _Choices, Meta(description="Answers to choose one from, the one you recommend first.")
    ] = ()
    fields: Annotated[
        tuple[_Field, ...],
        Meta(
            max_length=10,
            description="What else to ask for; without choices and fields, a text is asked for.",
        ),
    ] = ()


class AskPerson(Tool):
    """Asks the person in front of the client, and waits for as long as they think."""

    name: ClassVar[str] = "ask"
    description: ClassVar[str] = (
        "Ask the person one question, if you cannot go on without what only they can decide or "
        "know. The turn waits for the answer. Offer choices where you can. Never ask for a "
        "password, key, token or any other secret, nor for permission: that is asked for anyway."
    )
    Args: ClassVar[type[Struct]] = _Args
    kind: ClassVar[ToolKind] = "other"
    effect: ClassVar[Effect] = "none"

    def view(self, args: _Args, roots: Roots) -> ToolView:
        """Say what is asked, in one line."""
        return ToolView(shortened(" ".join(args.question.split()), MAX_TITLE_CHARS))

    async def run(self, args: _Args, context: ToolContext) -> ToolOutput:
        """Ask, and return the answer as text, or as JSON if there were several fields."""
        agent = context.agent
        call_id = context.call_id if agent.parent is None else None  # no client knows a child's
        reply = await ask(agent, _form(args), context.signal, call_id=call_id)
        if reply.action == "decline":
            raise ToolError("the person does not want to answer this question", code="DECLINED")
        if reply.action == "cancel":
            raise ToolError("the person dismissed the question", code="DISMISSED")
        if tuple(reply.content) == (ANSWER,):
            return ToolOutput(str(reply.content[ANSWER]))
        return ToolOutput(msgspec.json.encode(reply.content).decode())


def _form(args: _Args) -> Form:
    fields = [*args.fields]
    if args.choices or not fields:
        kind: Literal["choice", "text"] = "choice" if args.choices else "text"
        fields.insert(0, _Field(ANSWER, kind, "Answer", args.choices))
    names = [field.name for field in fields]
    if len(set(names)) < len(names):
        raise ToolError("two fields have the same name", code="BAD_ARGUMENTS")
    required = tuple(field.name for field in fields if field.is_required)
    return Form(args.question, {field.name: _property(field) for field in fields}, required)


def _property(field: _Field) -> Property:
    title = field.title or field.name.replace("_", " ")
    if (field.kind == "choice") != bool(field.choices):
        problem = (
            "a choice needs choices" if field.kind == "choice" else "only a choice has choices"
        )
        raise ToolError(f"{field.name}: {problem}", code="BAD_ARGUMENTS")
    match field.kind:
        case "number" | "boolean":
            return Property(field.kind, title)
        case "choice":
            return Property("string", title, enum=tuple(dict.fromkeys(field.choices)))
        case "text":
            least = 1 if field.is_required else None
            return Property("string", title, min_length=least, max_length=MAX_ANSWER_CHARS)
