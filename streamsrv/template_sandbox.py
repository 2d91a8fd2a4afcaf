"""A Jinja2 sandbox for chat templates in which neither time nor memory can run away.

A template comes with a model and is foreign code. Jinja's own sandbox keeps it from the interpreter; this
one also ends it: each turn of a loop and each call of a macro looks at the clock, and no operation may make
a value longer than a limit.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# A number this large in a format, as in "%99999d", makes a long text out of nothing.
_WIDE_FORMAT = re.compile(r"\d{5}|\*")
_MAX_INTEGER_BITS = 4096
# Filters that pick and order items, and make no text of them. Templates call them for each message.
_SELECTING_FILTERS = frozenset(
    [
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "groupby",
        "items",
        "last",
        "length",
        "list",
        "map",
        "max",
        "min",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
        "sort",
        "unique",
    ]
)


class TemplateLimitError(TemplateError):
    """The template took too long, or made a value that is too long."""


class TemplateRefusalError(TemplateError):
    """The template called `raise_exception`: it does not take these messages."""


class GenerationTag(Extension):
    """Accepts `{% generation %}`, which marks an answer's extent for training and changes no text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it as an instance's attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Take the body as it is."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for, with limits.

    `max_chars` bounds every text and list that a template makes, `max_s` its time by `clock`. Source of the
    settings and helpers: Hugging Face transformers' `_compile_jinja_template`.
    """

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, *, max_chars: int, max_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, GenerationTag],
            finalize=self._weighed,
            cache_size=0,
        )
        self.max_chars = max_chars
        self._max_s = max_s
        self._clock = clock
        self._deadline: ContextVar[float] = ContextVar("deadline")
        self.filters["tojson"] = _tojson
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Start the clock for one rendering."""
        token = self._deadline.set(self._clock() + self._max_s)
        try:
            yield
        finally:
            self._deadline.reset(token)

    def tick(self) -> bool:
        """Stop a template that has used up its time."""
        if self._clock() > self._deadline.get():
            raise TemplateLimitError(f"it runs longer than {self._max_s:g} s")
        return True

    def joined(self, *parts: object) -> str:
        """Do `~`, within the limit."""
        return self.concat([str(self._weighed(part)) for part in parts])

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a block or macro has written, within the limit."""
        texts = list(parts)
        self.check_length(sum(map(len, texts)))
        return "".join(texts)

    def check_length(self, length: int) -> None:
        """Refuse a text or list of this length if it is over the limit."""
        if length > self.max_chars:
            raise TemplateLimitError(f"it makes a text or list longer than {self.max_chars}")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        return _Limits(self).visit(template)  # type: ignore[no-any-return]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse what would make a value over the limit, before making it."""
        sizes = [len(x) if isinstance(x, Sized) else None for x in (left, right)]
        if operator == "+":
            self.check_length(sum(size or 0 for size in sizes))
        elif operator == "%" and isinstance(left, str):
            self._check_format(left)
            self._weighed(right)
        elif operator == "*":
            for size, factor in zip(sizes, (right, left), strict=True):
                if size is not None and isinstance(factor, int):
                    self.check_length(size * factor)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INTEGER_BITS:
                raise TemplateLimitError(f"it makes a number of more than {_MAX_INTEGER_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method within the limits."""
        function = getattr(obj, "__wrapped__", obj)
        subject = getattr(function, "__self__", None)
        values = (*(() if subject is None else (subject,)), *args, *kwargs.values())
        self._check_arguments(getattr(function, "__name__", ""), values)
        if isinstance(subject, str):
            self._weighed(args)
            self._weighed(kwargs)
        return self._checked(super().call(context, obj, *args, **kwargs))

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._check_arguments(function.__name__.removeprefix("do_"), (*args, *kwargs.values()))
            if name not in _SELECTING_FILTERS:
                self._weighed(args)
                self._weighed(kwargs)
            return self._checked(function(*args, **kwargs))

        return bounded

    def _check_arguments(self, name: str, values: tuple[Any, ...]) -> None:
        texts = [value for value in values if isinstance(value, str)]
        longest = max(map(len, texts), default=1)
        for value in values:
            if isinstance(value, int):
                # Padding, indenting and expanding tabs make at most this much.
                self.check_length(max(1, longest) * value)
            elif name == "join" and isinstance(value, list | tuple):
                self.check_length(len(value) * longest)
        if name in ("format", "format_map") and texts:
            self._check_format(texts[0])
        elif name == "replace" and len(texts) == 3:
            self.check_length(texts[0].count(texts[1]) * len(texts[2]))

    def _check_format(self, text: str) -> None:
        if _WIDE_FORMAT.search(text):
            raise TemplateLimitError("it formats a text with a width of five digits or more")

    def _weighed(self, value: Any) -> Any:
        """Refuse a value whose text would be over the limit, such as a list of lists of one long text."""
        if isinstance(value, str | int | float | None):
            return value  # a text's own length is checked where it is made
        weight = 0
        left = [value]
        while left:
            item = left.pop()
            if isinstance(item, str):
                weight += len(item)
            elif isinstance(item, Mapping):
                left += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple | set | frozenset):
                left += item
            elif isinstance(item, Namespace):
                left.append(object.__getattribute__(item, "_Namespace__attrs"))
            weight += 1
            self.check_length(weight)
        return value

    def _checked(self, value: Any) -> Any:
        if isinstance(value, Sized):
            self.check_length(len(value))
        return value


class _Limits(NodeTransformer):
    """Puts a look at the clock into loops and macros, and the limit on lengths into `~`.

    Calls on an attribute of the environment: no variable of the template's can stand in their way.
    """

    def __init__(self, environment: TemplateSandbox) -> None:
        self._environment = environment

    def _call(self, method: str, at: nodes.Node, arguments: list[nodes.Expr]) -> nodes.Call:
        made: dict[str, Any] = {"lineno": at.lineno, "environment": self._environment}
        function = nodes.EnvironmentAttribute(method, **made)
        return nodes.Call(function, arguments, [], None, None, **made)

    def _tick(self, at: nodes.Node) -> nodes.ExprStmt:
        return nodes.ExprStmt(self._call("tick", at, []), lineno=at.lineno, environment=self._environment)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """Look at the clock at each turn, and at each item that the loop's condition passes over."""
        self.generic_visit(node)
        node.body.insert(0, self._tick(node))
        if node.test is not None:
            tick = self._call("tick", node, [])
            node.test = nodes.And(tick, node.test, lineno=node.lineno, environment=self._environment)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        """Look at the clock at each call."""
        self.generic_visit(node)
        node.body.insert(0, self._tick(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """Join within the limit."""
        self.generic_visit(node)
        return self._call("joined", node, node.nodes)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes "<" and "&" for HTML, which a model has never seen.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise TemplateRefusalError(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002 (templates may name it)
    return datetime.now().strftime(format)
