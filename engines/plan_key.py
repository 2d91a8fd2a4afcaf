"""What a plan depends on: the model, the library, the hardware, and the sizes that it is built for."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

Bounds: TypeAlias = tuple[int, int, int]
"""Least, optimum and greatest size of a dimension."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The sizes that one optimisation profile allows."""

    batch: Bounds
    """B: sequences of a run."""
    tokens: Bounds
    """S: tokens of each."""
    logit_rows: Bounds
    """R: rows of logits."""

    def holds(self, num_sequences: int, num_tokens: int, num_rows: int) -> bool:
        """Whether a run of these sizes can use it."""
        sizes = (num_sequences, num_tokens, num_rows)
        bounds = (self.batch, self.tokens, self.logit_rows)
        return all(least <= size <= most for size, (least, _, most) in zip(sizes, bounds, strict=True))


@dataclass(frozen=True, slots=True)
class PlanShape:
    """The sizes that a plan is built for."""

    max_batch: int
    """Most sequences in a decode run."""
    max_piece: int
    """Most tokens in a prefill run."""
    max_len: int
    """Cells of a row of the cache."""
    max_logit_rows: int
    """Most rows of logits in a prefill run."""
    decode_batches: tuple[int, ...]
    """Upper borders of the decode profiles, rising, and what each is tuned for; the last is max_batch."""

    def __post_init__(self) -> None:
        """Check what everything else relies on."""
        assert self.decode_batches, "a plan needs a decode profile"
        assert self.decode_batches == tuple(sorted(set(self.decode_batches)))
        assert self.decode_batches[-1] == self.max_batch
        assert min(self.decode_batches[0], self.max_piece, self.max_len, self.max_logit_rows) >= 1

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The profiles in their order: 0 is prefill, then one for each range of decode batches."""
        piece, rows = self.max_piece, self.max_logit_rows
        profiles = [Profile((1, 1, 1), (1, piece, piece), (1, 1, rows))]
        least = 1
        for most in self.decode_batches:
            profiles.append(Profile((least, most, most), (1, 1, 1), (1, most, most)))
            least = most + 1
        return tuple(profiles)

    def profile_of(self, num_sequences: int, num_tokens: int) -> int:
        """Choose the profile of a run: several tokens are prefill, one of each sequence is decode."""
        if num_tokens > 1:
            return 0
        return 1 + next(i for i, most in enumerate(self.decode_batches) if num_sequences <= most)


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """The hardware that a plan runs on."""

    compute_capability: tuple[int, int]
    """Such as (8, 9)."""
    gpu: str | None = None
    """The GPU's name, where plans are for one kind of GPU (tensorrt); None is any of the capability."""
    driver: int | None = None
    """CUDA's version that the driver supports, such as 13000, where plans depend on it."""

    @property
    def sm(self) -> int:
        """The capability as one number: 89 for 8.9, 120 for 12.0."""
        major, minor = self.compute_capability
        return major * 10 + minor

    @property
    def capability_text(self) -> str:
        """The capability as NVIDIA writes it: "8.9"."""
        return ".".join(map(str, self.compute_capability))

    @property
    def label(self) -> str:
        """The target in a few words."""
        return f"{self.gpu or 'any GPU'} of compute capability {self.capability_text}"


@dataclass(frozen=True, slots=True)
class PlanKey:
    """Everything that a plan depends on."""

    model: str
    """The prepared model's name: the hash of what it was made from and of the code that made it."""
    form: str
    """The graph's form, as `GraphForm.label` says it."""
    library: str
    version: str
    target: PlanTarget
    shape: PlanShape
    flags: tuple[str, ...] = ()
    """What else was asked of the builder."""

    @property
    def parts(self) -> dict[str, Any]:
        """The key as JSON holds it."""
        parts: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return parts

    @property
    def digest(self) -> str:
        """The plan's name on disk."""
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()[:32]
