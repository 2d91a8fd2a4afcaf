"""What the engines' and the graphs' numbers are held against, and how."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.api import Engine, FloatArray
from engines.checkpoint import open_checkpoint
from engines.form import GraphForm
from engines.graph import write_model
from engines.spec import ModelSpec
from tests import steps
from tests.oracle import OracleDecoder

EXACT_BOUND = 2e-4
"""Largest difference of a logit in float32; 1e-4 was measured, on logits of up to 30."""
TIE = 1e-4
"""Where the oracle's two best logits are closer, either may be chosen."""

PROMPTS = (
    "The capital of France is",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "Once upon a time, in a small village by the sea, there lived",
)


def oracle_of(path: Path) -> OracleDecoder:
    """The oracle of a checkpoint, with its weights read."""
    with open_checkpoint(path) as checkpoint:
        oracle = OracleDecoder(checkpoint.tensor, checkpoint.spec)
        oracle.logits([0])  # reads every weight
        return oracle


def write_graph(checkpoint: Path, path: Path, form: GraphForm) -> ModelSpec:
    """Write a checkpoint's graph; the checkpoint's spec."""
    with open_checkpoint(checkpoint) as opened:
        write_model(opened.spec, opened, path, form)
        return opened.spec


@dataclass(frozen=True, slots=True)
class Continued:
    """A prompt, continued by an exact engine."""

    prompt: list[int]
    ids: list[int]
    """Greedy tokens."""
    logits: FloatArray
    """`[tokens, vocab_size]`: what the engine chose them by."""
    expected: FloatArray
    """The oracle's logits after the same tokens."""

    @property
    def fed(self) -> list[int]:
        """The tokens whose logits these are the last of."""
        return self.prompt + self.ids[:-1]


def continue_prompts(engine: Engine, path: Path, num_steps: int) -> list[Continued]:
    """Continue PROMPTS on an engine of a checkpoint, by so many tokens each."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(engine.model.vocabulary.tokenizer_json)
    oracle, continued = oracle_of(path), []
    for text in PROMPTS:
        prompt = tokenizer.encode(text).ids
        context = engine.create_context()
        ids, logits = steps.greedy(context, prompt, num_steps)
        context.close()
        expected = oracle.logits(prompt + ids[:-1])[len(prompt) - 1 :]
        continued.append(Continued(prompt, ids, logits, expected))
    return continued


def relative_rms(logits: FloatArray, expected: FloatArray) -> float:
    """Root-mean-square difference in standard deviations of what is expected."""
    return float(np.sqrt(np.mean((logits - expected) ** 2)) / expected.std())


def assert_near(logits: FloatArray, expected: FloatArray) -> None:
    """Check that no logit is further off than float32 explains."""
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, rtol=0, atol=EXACT_BOUND)


def assert_same_choice(ids: list[int], expected: FloatArray) -> None:
    """Check that each token is the oracle's choice after those before it, up to the first tie."""
    for token_id, logits in zip(ids, expected, strict=True):
        best, second = np.sort(logits)[[-1, -2]]
        if best - second < TIE:
            return
        assert token_id == logits.argmax()
