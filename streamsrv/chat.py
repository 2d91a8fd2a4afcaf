"""Chat messages and tools, and what a template sees of them."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engines.api import StreamsrvError

MAX_JSON_DEPTH = 100
"""Objects and lists inside each other in a schema, in arguments or in a variable."""

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ChatTemplateError(StreamsrvError):
    """There is no chat template, it is faulty, or it does not take these messages, tools or variables."""

    reason = "CHAT_TEMPLATE_FAILED"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as a model made it."""

    id: str
    """Its name within its stream or conversation."""
    name: str
    arguments_json: str
    """A JSON object as text."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters_json_schema: str = ""
    """A JSON schema of its arguments, an object as text; empty: it takes none."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a chat.

    Raises:
        ChatTemplateError: the role is no plain word, which templates put between a control token's brackets;
            or another than the assistant calls tools, or another than a tool brings a result.

    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """An assistant's."""
    tool_call_id: str = ""
    """In a tool's turn: the call that this is the result of. Empty: not told."""

    def __post_init__(self) -> None:
        if not _ROLE.fullmatch(self.role):
            raise ChatTemplateError(
                f"a message's role must be 1 to 64 letters, digits, '_' or '-', got {self.role[:80]!r}"
            )
        if self.tool_calls and self.role != "assistant":
            raise ChatTemplateError(f"only an assistant's message can have tool_calls, not a {self.role}'s")
        if self.tool_call_id and self.role != "tool":
            raise ChatTemplateError(f"only a tool's message can have a tool_call_id, not a {self.role}'s")


def chat_values(
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
    variables: Mapping[str, object],
    mark: Callable[[str], str] | None = None,
) -> dict[str, object]:
    """What a template sees: `messages`, `tools` and the variables; `mark` as in `ChatTemplate.render`.

    Tools and their calls have the shape that Hugging Face transformers gives them. A tool's turn has the name
    of the tool too, where a call before it has its id; some templates show it. A variable's objects are in
    the order of their keys, since the wire keeps none, and its whole numbers are integers.

    Raises:
        ChatTemplateError: a schema, arguments or a variable are no good JSON.

    """
    mark = mark or _unmarked
    names: dict[str, str] = {}
    turns = []
    for message in messages:
        names.update((call.id, call.name) for call in message.tool_calls if call.id)
        turn: dict[str, object] = {"role": message.role, "content": mark(message.content)}
        if message.tool_calls:
            turn["tool_calls"] = [_call(call, mark) for call in message.tool_calls]
        if message.tool_call_id:
            turn["tool_call_id"] = mark(message.tool_call_id)
            if message.tool_call_id in names:
                turn["name"] = mark(names[message.tool_call_id])
        turns.append(turn)
    return {
        **{
            name: _mapped(_ordered(value, f"the template variable {name!r}"), mark)
            for name, value in variables.items()
        },
        "messages": turns,
        "tools": [_function(tool, mark) for tool in tools] or None,
    }


def _unmarked(text: str) -> str:
    return text


def _call(call: ToolCall, mark: Callable[[str], str]) -> dict[str, object]:
    if not call.name:
        raise ChatTemplateError("a tool call must have a name")
    arguments = _object(call.arguments_json, f"the arguments_json of a call of {call.name[:80]!r}")
    function = {"name": mark(call.name), "arguments": _mapped(arguments, mark)}
    named = {"id": mark(call.id)} if call.id else {}
    return {"type": "function", **named, "function": function}


def _function(tool: Tool, mark: Callable[[str], str]) -> dict[str, object]:
    if not tool.name:
        raise ChatTemplateError("a tool must have a name")
    if tool.parameters_json_schema:
        what = f"the parameters_json_schema of the tool {tool.name[:80]!r}"
        parameters = _mapped(_object(tool.parameters_json_schema, what), mark)
    else:
        parameters = {"type": "object", "properties": {}}
    function = {"name": mark(tool.name), "description": mark(tool.description), "parameters": parameters}
    return {"type": "function", "function": function}


def _object(text: str, what: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ChatTemplateError(f"{what} must be a JSON object, and is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ChatTemplateError(f"{what} must be a JSON object, got {text[:80]!r}")
    _check_json(value, what)
    return value


def _check_json(value: object, what: str, depth: int = 0) -> None:
    """Refuse what JSON cannot say, or UTF-8, or what is too deep to be read by recursion."""
    if depth > MAX_JSON_DEPTH:
        raise ChatTemplateError(f"{what} is nested deeper than {MAX_JSON_DEPTH}")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_json(key, what)
            _check_json(item, what, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_json(item, what, depth + 1)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ChatTemplateError(f"{what} holds half of a surrogate pair, which is no text") from error
    elif isinstance(value, float) and not math.isfinite(value):
        raise ChatTemplateError(f"{what} holds a number that is not finite")


def _ordered(value: object, what: str) -> object:
    _check_json(value, what)

    def ordered(item: object) -> object:
        if isinstance(item, dict):
            return {key: ordered(item[key]) for key in sorted(item)}
        if isinstance(item, list):
            return [ordered(part) for part in item]
        return int(item) if isinstance(item, float) and item.is_integer() else item

    return ordered(value)


def _mapped(value: object, mark: Callable[[str], str]) -> object:
    if isinstance(value, dict):
        return {mark(key): _mapped(item, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, mark) for item in value]
    return mark(value) if isinstance(value, str) else value
