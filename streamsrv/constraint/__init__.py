"""Structured output: a language that an output must be a text of, as masks over the next token."""

from streamsrv.constraint.compiler import Constraint, ConstraintCompiler
from streamsrv.constraint.mask import apply_mask, num_mask_words
from streamsrv.constraint.spec import (
    MAX_CONSTRAINT_BYTES,
    ConstraintFailedError,
    ConstraintKind,
    ConstraintSpec,
    InvalidConstraintError,
)
from streamsrv.constraint.state import ConstraintState

__all__ = [
    "MAX_CONSTRAINT_BYTES",
    "Constraint",
    "ConstraintCompiler",
    "ConstraintFailedError",
    "ConstraintKind",
    "ConstraintSpec",
    "ConstraintState",
    "InvalidConstraintError",
    "apply_mask",
    "num_mask_words",
]
