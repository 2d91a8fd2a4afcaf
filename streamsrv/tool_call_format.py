"""How a model writes calls of tools."""

import re
from enum import Enum

from engines.spec import Vocabulary


class ToolCallFormat(Enum):
    """A family's way of writing calls; the value is its public name."""

    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen, SmolLM."""
    LLAMA3 = "llama3"
    """`{"name": …, "parameters": {…}}` at the output's beginning, or after `<|python_tag|>`; several with ";"
    between them."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name{…}` for each call."""
    QWEN_XML = "qwen_xml"
    """`<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`: Qwen3-Coder."""

    @property
    def opening(self) -> str:
        """The text that begins a call."""
        return _OPENINGS[self]

    @property
    def closing(self) -> str:
        """The text after a call that belongs to it. Models leave it out at times."""
        return "</tool_call>" if self in (ToolCallFormat.HERMES, ToolCallFormat.QWEN_XML) else ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts in the format that are control tokens in some vocabularies; a parser has to see them."""
        if self is ToolCallFormat.MISTRAL:
            return (self.opening, "[CALL_ID]", "[ARGS]")
        return (self.opening, self.closing) if self.closing else (self.opening,)

    @property
    def thinks(self) -> bool:
        """Whether its models think between `<think>` and `</think>`, where calls are only thought of."""
        return self in (ToolCallFormat.HERMES, ToolCallFormat.QWEN_XML)


_OPENINGS = {
    ToolCallFormat.HERMES: "<tool_call>",
    ToolCallFormat.LLAMA3: "<|python_tag|>",
    ToolCallFormat.MISTRAL: "[TOOL_CALLS]",
    ToolCallFormat.QWEN_XML: "<tool_call>",
}


def tool_call_format(vocabulary: Vocabulary) -> ToolCallFormat | None:
    """Tell from its chat template how a model writes calls; None if it says nothing of tools.

    Gemma 3 and Phi-3 have no way of their own: their templates take no tools.
    """
    template = vocabulary.chat_template or ""
    if not re.search(r"\btools\b", template):
        return None
    if "<tool_call>" in template:
        return ToolCallFormat.QWEN_XML if "<function=" in template else ToolCallFormat.HERMES
    if "[TOOL_CALLS]" in template:
        return ToolCallFormat.MISTRAL
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return ToolCallFormat.LLAMA3
    return None
