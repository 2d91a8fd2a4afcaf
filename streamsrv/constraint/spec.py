"""What an output must match, as the caller gave it: valid as far as that shows without a tokenizer."""

from dataclasses import InitVar, dataclass, field
from enum import Enum

from engines.api import StreamsrvError
from streamsrv.constraint.schema import SchemaError, read_schema
from streamsrv.errors import FieldViolation, InvalidRequestError

MAX_CONSTRAINT_BYTES = 65_536
# A status travels in a header, where gRPC allows 8 KiB in all; the compiler may quote the whole grammar.
_MAX_MESSAGE_CHARS = 1_000


class ConstraintKind(Enum):
    """How a language is given; the value is the field of the request message."""

    JSON_SCHEMA = "json_schema"
    """One text: a JSON schema."""
    REGEX = "regex"
    """One text: a regular expression, in the syntax of Rust's regex crate, for the whole output."""
    LARK = "lark"
    """One text: a grammar in llguidance's variant of Lark."""
    CHOICES = "choices"
    """Texts, one of which the output is."""


class InvalidConstraintError(InvalidRequestError):
    """A constraint that says nothing, is too large, or cannot be compiled; with the compiler's message."""

    reason = "CONSTRAINT_INVALID"

    def __init__(self, kind: ConstraintKind, description: str, *, part: str = "") -> None:
        """`part` is what comes behind the kind's name in the field's path."""
        if len(description) > _MAX_MESSAGE_CHARS:
            description = description[:_MAX_MESSAGE_CHARS] + " …"
        super().__init__(FieldViolation(f"constraint.{kind.value}{part}", description))
        self.kind = kind


class ConstraintFailedError(StreamsrvError):
    """A constraint could not be followed any further: its parser came to a limit, or nothing is allowed."""

    reason = "CONSTRAINT_FAILED"

    def __init__(self, cause: str) -> None:
        cause = cause.removesuffix("<non-verbose/>").strip()[:_MAX_MESSAGE_CHARS]
        super().__init__(
            f"the constraint cannot be followed any further ({cause}); simplify it, first of all what "
            "repeats or contains itself"
        )
        self.cause = cause


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """A language, to be compiled for a model. Equal specs have equal compiled forms.

    `max_bytes` bounds the texts, together, in UTF-8.

    Raises:
        InvalidConstraintError: it is empty, too long, or no JSON schema that can be followed; the field is
            named as in the request message.

    """

    kind: ConstraintKind
    texts: tuple[str, ...] = field(repr=False)
    """The choices; for any other kind exactly one text."""
    max_bytes: InitVar[int] = MAX_CONSTRAINT_BYTES

    def __post_init__(self, max_bytes: int) -> None:
        if self.num_bytes > max_bytes:
            description = f"must have at most {max_bytes} bytes, got {self.num_bytes}"
            raise InvalidConstraintError(self.kind, description)
        if self.kind is ConstraintKind.CHOICES:
            self._check_choices()
            return
        if len(self.texts) != 1 or not self.texts[0].strip():
            raise InvalidConstraintError(self.kind, "must not be empty; leave constraint out for any output")
        if self.kind is ConstraintKind.JSON_SCHEMA:
            try:
                read_schema(self.texts[0])
            except SchemaError as error:
                raise InvalidConstraintError(self.kind, str(error)) from error

    @property
    def num_bytes(self) -> int:
        """Length of the texts, together, in UTF-8."""
        return sum(len(text.encode()) for text in self.texts)

    def _check_choices(self) -> None:
        if not self.texts:
            raise InvalidConstraintError(self.kind, "must have at least one text, got none", part=".texts")
        seen: set[str] = set()
        for i, text in enumerate(self.texts):
            if not text or text in seen:
                what = "must not be empty" if not text else f"is there already: {text!r}"
                raise InvalidConstraintError(self.kind, what, part=f".texts[{i}]")
            seen.add(text)
