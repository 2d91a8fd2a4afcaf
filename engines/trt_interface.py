"""What the context needs an engine's inputs and outputs to be, held against what the runtime says of them."""

from dataclasses import dataclass
from typing import Any

from engines.form import GraphForm
from engines.options import Precision
from engines.plan_key import PlanShape
from engines.spec import ModelSpec
from engines.trt_library import TrtLibrary

_NUMBER_BYTES = {Precision.F32: 4, Precision.F16: 2, Precision.BF16: 2}
_TYPE_NAMES = {Precision.F32: "FLOAT", Precision.F16: "HALF", Precision.BF16: "BF16"}


@dataclass(frozen=True, slots=True)
class Interface:
    """Names, sizes and types of a linear graph's inputs and outputs."""

    spec: ModelSpec
    form: GraphForm
    shape: PlanShape

    @property
    def cache_names(self) -> tuple[str, ...]:
        """The caches: each layer's keys and values. The output of each has `new_` before its name."""
        layers = range(self.spec.num_layers)
        return tuple(f"{kind}_cache.{layer}" for layer in layers for kind in ("key", "value"))

    @property
    def row_bytes(self) -> int:
        """Memory of one row of one cache."""
        numbers = self.spec.num_kv_heads * self.shape.max_len * self.spec.head_dim
        return numbers * _NUMBER_BYTES[self.form.activations]

    def cache_shape(self, num_rows: int) -> tuple[int, int, int, int]:
        """Give the shape of one cache, or of the part of it that a run uses."""
        return num_rows, self.spec.num_kv_heads, self.shape.max_len, self.spec.head_dim

    def faults(self, library: TrtLibrary, engine: Any) -> list[str]:
        """Say in what an ICudaEngine is not as the context needs it; nothing if it is."""
        expected = self._expected()
        found = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        faults = [f"{name} is missing" for name in expected if name not in found]
        faults += [f"{name} is unknown" for name in found if name not in expected]
        if faults:
            return faults
        trt = library.module
        for name, (mode, kind, shape) in expected.items():
            is_as = (
                ("mode", engine.get_tensor_mode(name), getattr(trt.TensorIOMode, mode)),
                ("type", engine.get_tensor_dtype(name), getattr(trt.DataType, kind)),
                ("place", engine.get_tensor_location(name), trt.TensorLocation.DEVICE),
                ("shape", tuple(engine.get_tensor_shape(name)), shape),
            )
            faults += [
                f"{name}'s {what} is {is_}, not {should}" for what, is_, should in is_as if is_ != should
            ]
        for name in self.cache_names:
            # The documentation has it that an output without an alias is memory of its own. Then the cache
            # would not be updated in place, and binding both to one address might read what was written.
            if (alias := engine.get_aliased_input_tensor(f"new_{name}")) != name:
                faults.append(f"new_{name} is in the place of {alias}, not of {name}")
        return faults + self._profile_faults(engine)

    def _profile_faults(self, engine: Any) -> list[str]:
        profiles = self.shape.profiles
        if engine.num_optimization_profiles != len(profiles):
            return [f"it has {engine.num_optimization_profiles} profiles, not {len(profiles)}"]
        faults = []
        for index, profile in enumerate(profiles):
            ids = [tuple(shape) for shape in engine.get_tensor_profile_shape("input_ids", index)]
            rows = [tuple(shape) for shape in engine.get_tensor_profile_shape("logit_rows", index)]
            if ids != list(zip(profile.batch, profile.tokens, strict=True)):
                faults.append(f"profile {index} is for input_ids of {ids}, not {profile}")
            if rows != [(size,) for size in profile.logit_rows]:
                faults.append(f"profile {index} is for logit_rows of {rows}, not {profile}")
        return faults

    def _expected(self) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        """Mode, type and shape by name; -1 is what varies."""
        candidates = self.form.num_candidates
        kind = _TYPE_NAMES[self.form.activations]
        expected: dict[str, tuple[str, str, tuple[int, ...]]] = {
            "input_ids": ("INPUT", "INT64", (-1, -1)),
            "position_ids": ("INPUT", "INT64", (-1, -1)),
            "write_indices": ("INPUT", "INT64", (-1,)),
            "logit_rows": ("INPUT", "INT64", (-1,)),
            "cache_positions": ("INPUT", "INT64", (self.shape.max_len,)),
            "logits": ("OUTPUT", "FLOAT", (-1, self.spec.vocab_size)),
            "candidate_logits": ("OUTPUT", "FLOAT", (-1, candidates)),
            "candidate_ids": ("OUTPUT", "INT64", (-1, candidates)),
            "logsumexp": ("OUTPUT", "FLOAT", (-1,)),
        }
        for name in self.cache_names:
            expected[name] = ("INPUT", kind, self.cache_shape(-1))
            expected[f"new_{name}"] = ("OUTPUT", kind, self.cache_shape(-1))
        return expected
