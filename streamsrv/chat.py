"""Chat messages, and the template that makes one prompt of them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError, TemplateSyntaxError

from engines.api import StreamsrvError
from streamsrv.template_sandbox import TemplateLimitError, TemplateRefusalError, TemplateSandbox

MAX_RENDERED_CHARS = 4_000_000
"""Longest prompt that a template may make: about a million tokens."""
MAX_RENDER_S = 5.0
"""Longest time that a template may take. A thousand messages take a few milliseconds."""

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ChatTemplateError(StreamsrvError):
    """There is no chat template, it is faulty, or it does not take these messages."""

    reason = "CHAT_TEMPLATE_FAILED"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a chat.

    Raises:
        ChatTemplateError: the role is no plain word. Templates put it between a control token's brackets.

    """

    role: str
    content: str

    def __post_init__(self) -> None:
        if not _ROLE.fullmatch(self.role):
            raise ChatTemplateError(
                f"a message's role must be 1 to 64 letters, digits, '_' or '-', got {self.role[:80]!r}"
            )


class ChatTemplate:
    """A model's Jinja2 chat template, compiled.

    `bos_token` and `eos_token` are what the template may mention; None leaves them undefined, and they
    render as nothing.

    Raises:
        ChatTemplateError: the source is no valid template.

    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None,
        eos_token: str | None,
        max_chars: int = MAX_RENDERED_CHARS,
        max_s: float = MAX_RENDER_S,
    ) -> None:
        self.source = source
        self._tokens = {
            name: text
            for name, text in (("bos_token", bos_token), ("eos_token", eos_token))
            if text is not None
        }
        self._environment = TemplateSandbox(max_chars=max_chars, max_s=max_s)
        try:
            self._template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the model's chat template is faulty at line {error.lineno}: {error.message}"
            ) from error
        except (TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
            raise ChatTemplateError(f"the model's chat template cannot be compiled: {error}") from error

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """Write the prompt, ending with the opening of the assistant's turn if asked for.

        Raises:
            ChatTemplateError: the template refuses the messages, fails on them or passes its limits.

        """
        values = {
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._tokens,
        }
        parts: list[str] = []
        length = 0
        try:
            with self._environment.limited():
                for part in self._template.generate(values):
                    parts.append(part)
                    length += len(part)
                    self._environment.check_length(length)
        except TemplateRefusalError as error:
            raise ChatTemplateError(
                f"the model's chat template refuses the messages: {error.message}"
            ) from error
        except TemplateLimitError as error:
            raise ChatTemplateError(f"the model's chat template was stopped: {error.message}") from error
        except Exception as error:  # foreign code, which may raise anything
            kind = type(error).__name__
            raise ChatTemplateError(f"the model's chat template failed: {error} ({kind})") from error
        return "".join(parts)
