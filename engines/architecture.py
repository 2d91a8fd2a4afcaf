"""What a checkpoint must be to be supported, whichever format it is in."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.api import CheckpointError, FloatArray
from engines.spec import Family, ModelSpec
from engines.tensors import tensor_shapes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a file keeps a tensor: in one of its own, or in some rows of one of several."""

    name: str
    """The file's tensor."""
    first_row: int
    shape: tuple[int, ...]

    def rows(self, wanted: slice | None) -> slice:
        """Turn rows of the tensor, None for all, into rows of the file's."""
        first, end, _ = (wanted or slice(None)).indices(self.shape[0])
        return slice(self.first_row + first, self.first_row + max(first, end))


def family_of(architecture: str, known: Mapping[str, Family], path: Path) -> Family:
    """Look up a format's name for an architecture.

    Raises:
        CheckpointError: it is not among the known ones; the message lists them.

    """
    try:
        return known[architecture]
    except KeyError:
        allowed = ", ".join(known)
        raise CheckpointError(
            f"{path}: architecture {architecture!r} is not supported; supported are {allowed}"
        ) from None


def check_spec(spec: ModelSpec, path: Path) -> None:
    """Check what the numbers of a spec must satisfy together.

    Raises:
        CheckpointError: they contradict each other.

    """
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"{path}: {spec.num_heads} attention heads cannot share {spec.num_kv_heads} key/value heads; "
            "the first must be a multiple of the second"
        )
    if spec.head_dim % 2:
        raise CheckpointError(f"{path}: heads of {spec.head_dim} numbers cannot be rotated; it must be even")


def check_tensors(
    spec: ModelSpec,
    path: Path,
    file_name: Callable[[str], str],
    shapes: Mapping[str, tuple[int, ...]],
    ignored: Callable[[str], bool],
) -> dict[str, StoredTensor]:
    """Match the tensors of a file with those that the spec asks for.

    Tensors that the file has one name for lie below one another in it, in the order of `tensor_shapes`.

    Args:
        spec: the model's shape.
        path: for messages.
        file_name: turns a name of `engines.tensors` into the file's.
        shapes: every tensor of the file, by the file's names.
        ignored: tells of a file's name whether the tensor does no harm if it is left out.

    Returns:
        Where each tensor of the model is, by its name in `engines.tensors`.

    Raises:
        CheckpointError: one is missing, has another shape, or is not known. A tensor that is not known
            is an error because leaving it out, a bias for instance, would give wrong output.

    """
    places: dict[str, StoredTensor] = {}
    num_rows: Counter[str] = Counter()
    for name, shape in tensor_shapes(spec):
        stored = file_name(name)
        places[name] = StoredTensor(stored, num_rows[stored], shape)
        num_rows[stored] += shape[0]
    for place in places.values():
        stored, shape = place.name, (num_rows[place.name], *place.shape[1:])
        if stored not in shapes:
            raise CheckpointError(f"{path}: tensor {stored!r} is missing; copy or download the model again")
        if shapes[stored] != shape:
            raise CheckpointError(
                f"{path}: tensor {stored!r} has shape {list(shapes[stored])}, "
                f"but the model's settings make it {list(shape)}"
            )
    for stored in shapes:
        if stored not in num_rows and not ignored(stored):
            raise CheckpointError(
                f"{path}: tensor {stored!r} is not part of a {spec.family.value} model as supported here "
                f"({_SUPPORTED[spec.family]})"
            )
    return places


def check_finite(weights: FloatArray, stored: str, path: Path) -> None:
    """Check that no weight is infinite or not a number.

    Raises:
        CheckpointError: one is, as in a damaged file.

    """
    # Least and largest pass on any NaN, and need no array of flags.
    if weights.size and not (np.isfinite(weights.min()) and np.isfinite(weights.max())):
        raise CheckpointError(
            f"{path}: tensor {stored!r} holds weights that are not finite numbers; "
            "the file is damaged, copy or download it again"
        )


_SUPPORTED = {
    Family.LLAMA: "dense, without biases",
    Family.QWEN2: "dense, with biases on Q, K and V alone",
    Family.QWEN3: "dense, with norms over query and key heads, without biases",
    Family.GEMMA3: "dense, for text, with norms around each block and over query and key heads, no biases",
    Family.PHI3: "dense, with Q, K and V in one, gate and up in one, without biases",
}
