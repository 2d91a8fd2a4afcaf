"""The template that makes one prompt of a chat."""

from collections.abc import Callable, Mapping, Sequence

from jinja2 import TemplateError, TemplateSyntaxError, meta

from streamsrv.chat import ChatMessage, ChatTemplateError, Tool, chat_values
from streamsrv.template_sandbox import TemplateLimitError, TemplateRefusalError, TemplateSandbox

MAX_RENDERED_CHARS = 4_000_000
"""Longest prompt that a template may make: about a million tokens."""
MAX_RENDER_S = 5.0
"""Longest time that a template may take. A thousand messages take a few milliseconds."""

_RESERVED = frozenset(["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"])


class ChatTemplate:
    """A model's Jinja2 chat template, compiled.

    `bos_token` and `eos_token` are what the template may mention; None leaves them undefined, and they
    render as nothing.

    It sees `messages`, `tools`, `documents`, `add_generation_prompt`, the two tokens and the request's own
    variables; of functions, Jinja's own, `raise_exception(message)` and `strftime_now(format)`.

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
            names = meta.find_undeclared_variables(self._environment.parse(source))
        except TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the model's chat template is faulty at line {error.lineno}: {error.message}"
            ) from error
        except (TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
            raise ChatTemplateError(f"the model's chat template cannot be compiled: {error}") from error
        self._takes_tools = "tools" in names
        self._takes_tool_calls = "tool_calls" in source
        self._variables = sorted(names - _RESERVED)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        mark: Callable[[str], str] | None = None,
    ) -> str:
        """Write the prompt, ending with the opening of the assistant's turn if asked for.

        `variables` are JSON values that the template may ask for by name, `documents` among them. `mark`
        changes every text of the caller's on its way into the template: contents, names, ids, and texts
        anywhere in schemas, arguments and variables, an object's keys too.

        Raises:
            ChatTemplateError: the template does not take tools, their calls or a variable; a schema,
                arguments or a variable are no good JSON; the template refuses the messages, fails on them or
                passes its limits.

        """
        variables = variables or {}
        self._check(messages, tools, variables)
        values = {
            "documents": None,
            **chat_values(messages, tools, variables, mark),
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

    def _check(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool], variables: Mapping[str, object]
    ) -> None:
        """Refuse what the template would pass over in silence, or what would change more than it should."""
        if tools and not self._takes_tools:
            raise ChatTemplateError("the model's chat template takes no tools; leave them out")
        if not self._takes_tool_calls and any(message.tool_calls for message in messages):
            raise ChatTemplateError(
                "the model's chat template does not show tool_calls; write them into the content"
            )
        for name in variables:
            if name in _RESERVED or name in self._environment.globals:
                raise ChatTemplateError(f"{name!r} is not a template variable that a request can set")
            if name not in self._variables:
                allowed = ", ".join(self._variables) or "none"
                raise ChatTemplateError(
                    f"the model's chat template has no variable {name[:80]!r}; its variables are: {allowed}"
                )
