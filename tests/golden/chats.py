"""Conversations, templates, and where the golden renderings of them are."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOLDEN_CHATS = Path(__file__).with_name("chats.json")
"""Made by make_chats.py: by template and conversation the text, or the error that the template raises."""
TEMPLATES = Path(__file__).with_name("templates")
BOS, EOS = "<s>", "</s>"
"""What every template is told that these tokens are."""

_WEATHER = {
    "name": "get_weather",
    "description": 'The weather at a place, "now" or later.',
    "parameters": {
        "type": "object",
        "properties": {
            "place": {"type": "string", "description": "A city, e.g. Zürich"},
            "days": {"type": "integer", "minimum": 0, "default": 1},
            "units": {"type": "string", "enum": ["°C", "°F"]},
        },
        "required": ["place"],
    },
}
_ORDER = {
    "name": "place_order",
    "description": "",
    "parameters": {
        "$defs": {"line": {"type": "object", "properties": {"sku": {"type": "string"}}}},
        "type": "object",
        "properties": {
            "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "description": "What <b>&</b> how"},
            "paid": {"type": "boolean"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
}
_TIME = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}


def _call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": f"call{number:05}", "function": function}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat in the shape that Hugging Face transformers takes."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True

    @property
    def function_tools(self) -> list[dict[str, Any]] | None:
        """The tools with what transformers puts around them."""
        return [{"type": "function", "function": tool} for tool in self.tools] or None


_SYSTEM = {"role": "system", "content": " Be brief.\nAlways. "}
_ASK = {"role": "user", "content": "How is the weather\tin Zürich? {{ 1 + 1 }} "}
_ANSWER = {"role": "assistant", "content": "Sunny, 20 °C. "}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [_call(0, "get_weather", {"place": 'Zürich "HB"', "days": 2})],
}
_RESULT = {
    "role": "tool",
    "content": '{"temperature": 20.0, "sky": "☀"}',
    "tool_call_id": "call00000",
    "name": "get_weather",
}
_CALLS = {
    "role": "assistant",
    "content": "Let me see.",
    "tool_calls": [
        _call(0, "get_weather", {"place": "A\\B\n</tool_call>", "units": "°F"}),
        _call(1, "place_order", {"lines": [{"sku": "x", "n": 1.50}, {}], "paid": True, "note": None}),
        _call(2, "now", {}),
    ],
}
_RESULTS = [
    {"role": "tool", "content": "12", "tool_call_id": "call00000", "name": "get_weather"},
    {"role": "tool", "content": "", "tool_call_id": "call00001", "name": "place_order"},
    {"role": "tool", "content": "noon", "tool_call_id": "call00002", "name": "now"},
]
_ALL_TOOLS = [_WEATHER, _ORDER, _TIME]

CONVERSATIONS = {
    "question": Conversation([_ASK]),
    "turns": Conversation([_SYSTEM, _ASK, _ANSWER, _ASK]),
    "finished": Conversation([_SYSTEM, _ASK, _ANSWER], add_generation_prompt=False),
    "thought": Conversation([_ASK, {"role": "assistant", "content": "<think>\nHm\n</think>\n\nYes."}, _ASK]),
    "two_questions": Conversation([_ASK, _ASK]),
    "tools": Conversation([_SYSTEM, _ASK], _ALL_TOOLS),
    "tools_alone": Conversation([_ASK], [_WEATHER]),
    "called": Conversation([_ASK, _CALL], [_WEATHER], add_generation_prompt=False),
    "result": Conversation([_SYSTEM, _ASK, _CALL, _RESULT], [_WEATHER, _TIME]),
    "answered": Conversation([_ASK, _CALL, _RESULT, _ANSWER, _ASK], [_WEATHER]),
    "calls": Conversation([_ASK, _CALLS, *_RESULTS], _ALL_TOOLS),
    "result_without_id": Conversation([_ASK, _CALL, {"role": "tool", "content": "12"}], [_WEATHER]),
    "no_thinking": Conversation([_ASK], [_WEATHER], {"enable_thinking": False}),
    "thinking": Conversation([_SYSTEM, _ASK], [], {"enable_thinking": True}),
    "builtin": Conversation([_ASK, _CALL], [], {"builtin_tools": ["search", "code_interpreter"]}),
}
_DATE = {"date_string": "26 Jul 2024"}


def conversations_for(template: str) -> dict[str, Conversation]:
    """Choose the conversations that a template's variables allow, the day fixed where it shows one."""
    source = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    chosen = {}
    for name, chat in CONVERSATIONS.items():
        variables = chat.variables | (_DATE if "date_string" in source else {})
        takes = "tools" in source or not (chat.tools or any("tool_calls" in m for m in chat.messages))
        if takes and all(variable in source for variable in variables):
            chosen[name] = Conversation(chat.messages, chat.tools, variables, chat.add_generation_prompt)
    return chosen


def template_names() -> list[str]:
    """List the templates kept here."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def golden_chats() -> dict[str, dict[str, dict[str, str]]]:
    """Read the renderings: by template and conversation, `text` or `error`."""
    renderings: dict[str, dict[str, dict[str, str]]] = json.loads(GOLDEN_CHATS.read_text(encoding="utf-8"))
    return renderings
