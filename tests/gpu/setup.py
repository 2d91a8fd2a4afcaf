"""What the checks share: the GPU, the model, an engine on it, and a reference that a CPU computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engines.api import ExecutionContext, FloatArray
from engines.cuda_api import Cuda
from engines.options import CacheType, EngineOptions, Precision, WeightFormat
from engines.ort import open_onnxruntime
from engines.trt import TrtEngine, open_trt
from engines.trt_context import TrtContext
from engines.trt_library import TrtLibrary
from tests import steps

NUM_PROMPT_TOKENS = (48, 7, 130, 1, 23, 64, 12, 90)
"""Of each of the sequences that the checks run."""
NUM_STEPS = 64
"""Tokens that each is continued by."""


class CheckError(AssertionError):
    """What was found is not as it should be."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A sequence, continued by the onnxruntime engine in float32."""

    prompt: list[int]
    ids: list[int]
    """`NUM_STEPS` greedy tokens."""
    logits: FloatArray
    """`[NUM_STEPS, vocab_size]`: what each was the largest of."""

    @property
    def fed(self) -> list[int]:
        """The tokens whose last `NUM_STEPS` rows of logits these are."""
        return self.prompt + self.ids[:-1]


@dataclass(slots=True)
class Setup:
    """The GPU and the model under check."""

    cuda: Cuda
    library: TrtLibrary
    model: Path
    cache: Path
    """Folder of prepared models and plans."""
    options: EngineOptions
    references: list[Reference]

    def open(self, model: Path | None = None, **changes: Any) -> TrtEngine:
        """Open an engine; the caller closes it."""
        options = replace(self.options, cache_folder=self.cache, **changes)
        return open_trt(
            self.library.name,
            model or self.model,
            options,
            lambda _phase, _done: None,
            cuda=self.cuda,
            library=self.library,
        )

    @contextmanager
    def context(self, **changes: Any) -> Iterator[TrtContext]:
        """Open an engine and make one context."""
        engine = self.open(**changes)
        try:
            context = engine.create_context()
            try:
                yield context
            finally:
                context.close()
        finally:
            engine.close()


def make_references(model: Path, cache: Path) -> list[Reference]:
    """Continue random prompts on the CPU, exactly."""
    exact = EngineOptions(
        WeightFormat.FLOAT32, Precision.F32, CacheType.F32, max_batch=4, max_context=512, cache_folder=cache
    )
    engine = open_onnxruntime(model, exact, lambda _phase, _done: None)
    try:
        context = engine.create_context()
        try:
            return [_continue(context, engine.model.spec.vocab_size, n) for n in NUM_PROMPT_TOKENS]
        finally:
            context.close()
    finally:
        engine.close()


def _continue(context: ExecutionContext, vocab_size: int, num_tokens: int) -> Reference:
    prompt = np.random.default_rng(num_tokens).integers(0, vocab_size, num_tokens).tolist()
    ids, logits = steps.greedy(context, prompt, NUM_STEPS)
    return Reference(prompt, ids, logits)


MAX_RMS = 0.02
"""Largest root-mean-square difference of logits in 16-bit floats, in standard deviations of the logits."""
CLEAR = 0.1
"""A choice is clear if the best logit is so many standard deviations above the second."""


def compare(logits: FloatArray, expected: FloatArray) -> tuple[float, int]:
    """Hold logits against the reference's.

    Returns:
        The root-mean-square difference in standard deviations, and how many rows have another best token
        although the choice is clear.

    """
    if not np.isfinite(logits).all():
        raise CheckError("logits are not finite")
    deviation = float(expected.std())
    rms = float(np.sqrt(np.mean((logits - expected) ** 2))) / deviation
    best = np.sort(expected, axis=1)[:, -2:]
    clear = best[:, 1] - best[:, 0] > CLEAR * deviation
    differ = logits.argmax(axis=1) != expected.argmax(axis=1)
    return rms, int(np.count_nonzero(differ & clear))


def require_close(differences: list[tuple[float, int]]) -> str:
    """Judge comparisons, and sum them up.

    Raises:
        CheckError: one of them is too far off.

    """
    rms, others = max(rms for rms, _ in differences), sum(count for _, count in differences)
    found = f"rms {rms:.4f} of a standard deviation, {others} clear choices differ"
    if rms > MAX_RMS or others:
        raise CheckError(found)
    return found
