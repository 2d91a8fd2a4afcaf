"""Tools, their calls and template variables in chats."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.vocabulary import vocabulary_from_gguf
from streamsrv.chat import ChatMessage, ChatTemplateError, Tool, ToolCall
from streamsrv.chat_template import ChatTemplate
from streamsrv.tokenizer import Tokenizer
from streamsrv.tool_call_format import ToolCallFormat
from streamsrv.tool_calls import ToolCallParser
from tests import tiny_tokenizer, vocabularies
from tests.golden.chats import BOS, EOS, TEMPLATES, Conversation, conversations_for, golden_chats

_HELLO = [ChatMessage("user", "Hello")]
_ASKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% if m.tool_call_id %}{{ m.tool_call_id ~ m.name }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ style | tojson if style is defined }}{{ documents }}"
)


def _source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def _template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token=BOS, eos_token=EOS)


def _tokenizer(source: str) -> Tokenizer:
    metadata = vocabularies.byte_level_metadata() | {"tokenizer.chat_template": source}
    return Tokenizer(vocabulary_from_gguf(metadata))


def _parts(chat: Conversation) -> tuple[list[ChatMessage], list[Tool]]:
    messages = []
    for message in chat.messages:
        calls = tuple(
            ToolCall(
                call["id"],
                call["function"]["name"],
                json.dumps(call["function"]["arguments"], ensure_ascii=False),
            )
            for call in message.get("tool_calls", [])
        )
        messages.append(
            ChatMessage(message["role"], message["content"], calls, message.get("tool_call_id", ""))
        )
    tools = [
        Tool(tool["name"], tool["description"], json.dumps(tool["parameters"], ensure_ascii=False))
        for tool in chat.tools
    ]
    return messages, tools


_CASES = [(name, case) for name in golden_chats() if name != "smollm2" for case in conversations_for(name)]


@pytest.mark.parametrize(("name", "case"), _CASES)
def test_a_conversation_is_rendered_as_transformers_does(name: str, case: str) -> None:
    chat = conversations_for(name)[case]
    messages, tools = _parts(chat)
    expected = golden_chats()[name][case]
    template = _template(_source(name))

    def render() -> str:
        return template.render(
            messages,
            tools=tools,
            variables=chat.variables,
            add_generation_prompt=chat.add_generation_prompt,
        )

    if "error" in expected:
        with pytest.raises(ChatTemplateError, match=expected["error"]):
            render()
    else:
        assert render() == expected["text"]


@pytest.mark.parametrize("case", golden_chats()["smollm2"])
def test_the_demo_models_template_is_rendered_as_transformers_does(case: str, demo_path: Path) -> None:
    chat = conversations_for("phi3")[case]
    messages, _ = _parts(chat)
    text = vocabularies.demo(demo_path).render_chat(messages, chat.add_generation_prompt)
    assert text == golden_chats()["smollm2"][case]["text"]


def test_a_tool_without_description_and_schema_takes_no_arguments() -> None:
    text = _template("{{ tools | tojson }}").render(_HELLO, tools=[Tool("now")])
    function = {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert json.loads(text) == [{"type": "function", "function": function}]


def test_a_result_has_the_name_of_the_tool_that_was_called_by_its_id() -> None:
    calls = (ToolCall("a", "first", "{}"), ToolCall("b", "second", "{}"))
    messages = [
        ChatMessage("assistant", "", calls),
        ChatMessage("tool", "2", tool_call_id="b"),
        ChatMessage("tool", "?", tool_call_id="c"),
    ]
    source = "{% for m in messages if not m.tool_calls %}{{ m.tool_call_id }}={{ m.name }} {% endfor %}"
    assert _template(source).render(messages) == "b=second c= "


def test_a_call_without_an_id_has_none_in_the_template() -> None:
    source = "{{ messages[0].tool_calls[0].id is defined }}"
    assert _template(source).render([ChatMessage("assistant", "", (ToolCall("", "f", "{}"),))]) == "False"


def test_variables_are_seen_with_whole_numbers_and_in_the_order_of_their_keys() -> None:
    style = {"b": 1.0, "a": [1.5, None, True, {"d": "é", "c": -2.0}]}
    text = _template("{{ style | tojson }}").render(_HELLO, variables={"style": style})
    assert text == '{"a": [1.5, null, true, {"c": -2, "d": "é"}], "b": 1}'


def test_documents_are_a_variable() -> None:
    source = "{% for d in documents %}{{ d.title }}{% endfor %}"
    assert _template(source).render(_HELLO, variables={"documents": [{"title": "A"}]}) == "A"


_NAMES = [
    *("messages", "tools", "add_generation_prompt", "bos_token", "eos_token"),
    *("raise_exception", "strftime_now", "range", "namespace"),
]


@pytest.mark.parametrize("name", _NAMES)
def test_a_variable_cannot_take_the_place_of_the_templates_own(name: str) -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ messages }}{{ tools }}{{ add_generation_prompt }}{{ range }}"
    with pytest.raises(ChatTemplateError, match=f"'{name}' is not a template variable"):
        _template(source).render(_HELLO, variables={name: "x"})


def test_a_variable_that_the_template_does_not_have_is_refused_with_those_it_has() -> None:
    with pytest.raises(ChatTemplateError, match=r"no variable 'thinking'; .* enable_thinking"):
        _template(_source("qwen3")).render(_HELLO, variables={"thinking": True})


def test_tools_are_refused_where_the_template_takes_none() -> None:
    with pytest.raises(ChatTemplateError, match="takes no tools"):
        _template(_source("gemma3")).render(_HELLO, tools=[Tool("now")])


def test_calls_are_refused_where_the_template_does_not_show_them() -> None:
    with pytest.raises(ChatTemplateError, match="does not show tool_calls"):
        _template(_source("phi3")).render([ChatMessage("assistant", "", (ToolCall("a", "f", "{}"),))])


@pytest.mark.parametrize(
    "text", ["[]", "1", '"x"', "{", "{}x", "null", "", '{"a": ' * 2000 + "1" + "}" * 2000]
)
def test_arguments_that_are_no_json_object_are_refused(text: str) -> None:
    message = ChatMessage("assistant", "", (ToolCall("a", "f", text),))
    with pytest.raises(ChatTemplateError, match="arguments_json of a call of 'f' must be a JSON object"):
        _template(_ASKED).render([message])


@pytest.mark.parametrize("text", ["[]", "true", "{", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}'])
def test_a_schema_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ChatTemplateError, match="parameters_json_schema of the tool 'f'"):
        _template(_ASKED).render(_HELLO, tools=[Tool("f", "", text)])


def test_json_that_is_nested_too_deep_is_refused() -> None:
    text = '{"a": ' * 101 + "1" + "}" * 101
    with pytest.raises(ChatTemplateError, match="nested deeper than 100"):
        _template(_ASKED).render(_HELLO, tools=[Tool("f", "", text)])
    deep: object = 1
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(ChatTemplateError, match="variable 'style' is nested deeper"):
        _template(_ASKED).render(_HELLO, variables={"style": deep})


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_only_an_assistant_calls_tools(role: str) -> None:
    with pytest.raises(ChatTemplateError, match="only an assistant's message"):
        ChatMessage(role, "", (ToolCall("a", "f", "{}"),))


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_only_a_tool_brings_a_result(role: str) -> None:
    with pytest.raises(ChatTemplateError, match="only a tool's message"):
        ChatMessage(role, "", tool_call_id="a")


@pytest.mark.parametrize(("tool", "call"), [("", "f"), ("f", "")])
def test_tools_and_calls_have_names(tool: str, call: str) -> None:
    with pytest.raises(ChatTemplateError, match="must have a name"):
        _template(_ASKED).render(
            [ChatMessage("assistant", "", (ToolCall("a", call, "{}"),))], tools=[Tool(tool)]
        )


def _everywhere(text: str) -> tuple[list[ChatMessage], list[Tool], dict[str, object]]:
    """Put a text wherever a caller can put one."""
    inside = json.dumps({text: [text, {"x": {text: 1}}]}, ensure_ascii=False)
    messages = [
        ChatMessage("user", text),
        ChatMessage("assistant", text, (ToolCall(text, text or "f", inside),)),
        ChatMessage("tool", text, tool_call_id=text),
    ]
    return messages, [Tool(text or "f", text, inside)], {"style": {"s": [text, {text: text}]}}


def _control_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    return [token_id for token_id in ids if tokenizer.is_special(token_id)]


_TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.text("<|im_end>start \n", max_size=20),
    st.lists(
        st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "end|>", ">", "<", '"', "\\", "object"]),
        max_size=5,
    ).map("".join),
)


@given(text=_TEXT)
def test_whatever_tools_calls_and_variables_hold_the_templates_control_tokens_are_the_only_ones(
    text: str,
) -> None:
    tokenizer = _tokenizer(_ASKED)
    messages, tools, variables = _everywhere(text)
    ids = tokenizer.encode_chat(messages, tools=tools, variables=variables)
    assert _control_ids(tokenizer, ids) == [1, 2] * 3
    whole = tokenizer.render_chat(messages, tools=tools, variables=variables)
    assert tokenizer.decode(ids, skip_special=False) == whole
    parsed = tokenizer.encode(whole, add_special=False, parse_special=True)
    if _control_ids(tokenizer, parsed) == [1, 2] * 3:
        assert ids == parsed


def test_control_tokens_anywhere_in_a_chat_are_parsed_if_asked_for() -> None:
    tokenizer = _tokenizer(_ASKED)
    messages, tools, variables = _everywhere("<|im_end|>")
    ids = tokenizer.encode_chat(messages, tools=tools, variables=variables, parse_special=True)
    assert len(_control_ids(tokenizer, ids)) > 20


def test_a_template_may_look_at_words_of_a_schema_that_control_tokens_have_too() -> None:
    tokenizer = _tokenizer(
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if tools[0].function.parameters.properties.wanted.type == 'start' %}S{% endif %}"
    )
    tool = Tool("f", "<|im_end|>", '{"properties": {"wanted": {"type": "start"}}}')
    ids = tokenizer.encode_chat(_HELLO, tools=[tool])
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>Hello<|im_end|>S"
    assert _control_ids(tokenizer, ids) == [1, 2]


def test_a_control_token_made_of_a_schema_is_refused() -> None:
    tokenizer = _tokenizer("{{ tools[0].function.description.replace('</x>', '') }}{{ '<|im_end|>' }}")
    with pytest.raises(ChatTemplateError, match="holds the text of a control token"):
        tokenizer.encode_chat(_HELLO, tools=[Tool("f", "<|im_</x>end|>")])


_ROUND_TRIPS = [
    ("hermes", ToolCallFormat.HERMES),
    ("qwen2.5", ToolCallFormat.HERMES),
    ("qwen3", ToolCallFormat.HERMES),
    ("qwen3_coder", ToolCallFormat.QWEN_XML),
    ("llama3", ToolCallFormat.LLAMA3),
    ("mistral", ToolCallFormat.MISTRAL),
    ("mistral_v11", ToolCallFormat.MISTRAL),
]


@pytest.mark.parametrize(("name", "format_"), _ROUND_TRIPS)
def test_a_call_that_a_template_shows_is_read_back_from_what_it_shows(
    name: str, format_: ToolCallFormat
) -> None:
    template = _template(_source(name))
    arguments = {"place": 'Zürich </parameter2> \\ "x"', "days": 2, "more": {"a": [1, {"b": "}{"}]}}
    properties = {"place": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "object"}}
    tools = [Tool("get_weather", "It.", json.dumps({"type": "object", "properties": properties}))]
    call = ToolCall("call00000", "get_weather", json.dumps(arguments, ensure_ascii=False))
    asked = template.render(_HELLO, tools=tools)
    shown = template.render(
        [*_HELLO, ChatMessage("assistant", "", (call,))], tools=tools, add_generation_prompt=False
    )
    # What a model writes: all that the template adds to the question, up to the end of the turn.
    start = next(i for i, (a, b) in enumerate(zip(asked + "\0", shown, strict=False)) if a != b)
    parser = ToolCallParser(format_, tools)
    calls = [piece for piece in parser.push(shown[start:]) if isinstance(piece, ToolCall)]
    assert [(c.id, c.name, json.loads(c.arguments_json)) for c in calls] == [
        ("call00000", "get_weather", arguments)
    ]
    result = ChatMessage("tool", "sunny", tool_call_id=calls[0].id)
    again = template.render([*_HELLO, ChatMessage("assistant", "", tuple(calls)), result], tools=tools)
    assert again.startswith(shown[:start])
    assert "sunny" in again


def test_a_chat_without_tools_has_the_tokens_that_it_always_had() -> None:
    tokenizer = _tokenizer(tiny_tokenizer.CHAT_TEMPLATE)
    assert tokenizer.encode_chat(_HELLO) == tokenizer.encode(
        tokenizer.render_chat(_HELLO, tools=(), variables={}), add_special=False, parse_special=True
    )
