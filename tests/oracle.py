"""A plain NumPy float32 decoder: what the engines' logits are measured against.

Written to be read, from the papers and the models' published code; it shares no code with the engines.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.spec import Activation, ModelSpec

Floats = NDArray[np.float32]


@dataclass(slots=True)
class _Cache:
    """Keys and values of the tokens so far, `[tokens, kv_heads, head_dim]` per layer."""

    keys: list[Floats]
    values: list[Floats]
    length: int = 0


@dataclass(frozen=True, slots=True)
class Greedy:
    """A greedy continuation."""

    ids: list[int]
    logits: Floats
    """[steps, vocab_size]: what each id was the largest of."""


@dataclass(slots=True)
class OracleDecoder:
    """One sequence through one model.

    `weights` gives a tensor by its name in `engines.tensors`, such as `Checkpoint.tensor`; each is
    asked for once and kept.
    """

    weights: Callable[[str], Floats]
    spec: ModelSpec
    _kept: dict[str, Floats] = field(default_factory=dict)
    _cache: _Cache | None = None

    def logits(self, token_ids: Sequence[int]) -> Floats:
        """Logits `[tokens, vocab_size]` of a sequence from its beginning; forgets any sequence before."""
        self._cache = None
        return self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> Floats:
        """Logits `[tokens, vocab_size]` of tokens that follow those given since the last `logits`."""
        spec = self.spec
        if self._cache is None:
            empty = np.zeros((0, spec.num_kv_heads, spec.head_dim), np.float32)
            self._cache = _Cache([empty] * spec.num_layers, [empty] * spec.num_layers)
        positions = np.arange(self._cache.length, self._cache.length + len(token_ids))
        x = self._weight("embed")[np.asarray(token_ids)] * np.float32(spec.embed_scale)
        for i in range(spec.num_layers):
            attended = self._attention(i, self._norm(x, f"layers.{i}.attn_norm"), positions, self._cache)
            x = x + (self._norm(attended, f"layers.{i}.post_attn_norm") if spec.post_norms else attended)
            fed = self._feed_forward(i, self._norm(x, f"layers.{i}.mlp_norm"))
            x = x + (self._norm(fed, f"layers.{i}.post_mlp_norm") if spec.post_norms else fed)
        self._cache.length += len(token_ids)
        x = self._norm(x, "final_norm")
        return x @ self._weight("embed" if spec.tied_embeddings else "lm_head").T

    def greedy(self, prompt_ids: Sequence[int], num_steps: int) -> Greedy:
        """Continue a prompt with the most likely token, whatever it is, `num_steps` times."""
        steps = [self.logits(prompt_ids)[-1]]
        ids = [int(steps[0].argmax())]
        while len(ids) < num_steps:
            steps.append(self.extend(ids[-1:])[-1])
            ids.append(int(steps[-1].argmax()))
        return Greedy(ids, np.stack(steps))

    def _attention(self, i: int, x: Floats, positions: NDArray[Any], cache: _Cache) -> Floats:
        spec, num_new = self.spec, len(x)
        window = spec.window if spec.window is not None and i in spec.window.layers else None
        cos, sin = self._angles(positions, None if window is None else window.rope_theta)
        q, k, v = (self._project(i, part, x) for part in "qkv")
        if spec.qk_norm:
            q, k = self._norm(q, f"layers.{i}.q_norm"), self._norm(k, f"layers.{i}.k_norm")
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        cache.keys[i] = np.concatenate([cache.keys[i], k])
        cache.values[i] = np.concatenate([cache.values[i], v])
        group = spec.num_heads // spec.num_kv_heads
        keys, values = (np.repeat(kept, group, axis=1) for kept in (cache.keys[i], cache.values[i]))
        scale = spec.attention_scale if spec.attention_scale is not None else 1 / math.sqrt(spec.head_dim)
        scores = np.einsum("qhd,khd->hqk", q, keys) * np.float32(scale)
        hidden = np.arange(len(keys)) > positions[:, None]
        if window is not None:  # itself and as many before it as make up the size
            hidden |= np.arange(len(keys)) <= positions[:, None] - window.size
        scores = np.where(hidden, np.float32(-np.inf), scores)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        mixed: Floats = np.einsum("hqk,khd->qhd", shares, values).reshape(num_new, -1)
        return mixed @ self._weight(f"layers.{i}.o").T

    def _project(self, i: int, part: str, x: Floats) -> Floats:
        y = x @ self._weight(f"layers.{i}.{part}").T
        if self.spec.qkv_bias:
            y = y + self._weight(f"layers.{i}.{part}_bias")
        return y.reshape(len(x), -1, self.spec.head_dim)

    def _feed_forward(self, i: int, x: Floats) -> Floats:
        gate: Floats = x @ self._weight(f"layers.{i}.gate").T
        if self.spec.activation is Activation.GELU_TANH:  # Hendrycks and Gimpel, arXiv 1606.08415
            inner = np.float32(math.sqrt(2 / math.pi)) * (gate + np.float32(0.044715) * gate**3)
            gate = gate / 2 * (1 + np.tanh(inner))
        else:
            with np.errstate(over="ignore"):  # exp(-x) may be infinite, and the quotient then rightly 0
                gate = gate / (1 + np.exp(-gate))
        return (gate * (x @ self._weight(f"layers.{i}.up").T)) @ self._weight(f"layers.{i}.down").T

    def _norm(self, x: Floats, name: str) -> Floats:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        normed: Floats = x / np.sqrt(mean_square + np.float32(self.spec.rms_eps))
        return normed * self._weight(name)

    def _angles(self, positions: NDArray[Any], own_theta: float | None) -> tuple[Floats, Floats]:
        """Cosines and sines `[tokens, 1, head_dim / 2]`; of a layer with a base of its own, unstretched."""
        spec = self.spec
        exponents = -(np.arange(0, spec.head_dim, 2) / spec.head_dim)
        if own_theta is not None:
            rates = own_theta**exponents
        else:
            rates = spec.rope_theta**exponents
            if spec.rope_factors is not None:
                rates = rates / np.asarray(spec.rope_factors)
            if spec.rope_scaling is not None:
                rates = np.array([self._stretched(float(rate)) for rate in rates])
        angles = positions[:, None, None] * rates
        cos, sin = spec.rope_magnitude * np.cos(angles), spec.rope_magnitude * np.sin(angles)
        return cos.astype(np.float32), sin.astype(np.float32)

    def _stretched(self, rate: float) -> float:
        """Llama 3.1's `apply_scaling` (meta-llama/llama-models, models/llama3/model.py)."""
        scaling = self.spec.rope_scaling
        assert scaling is not None
        wavelength = 2 * math.pi / rate
        if wavelength < scaling.original_context / scaling.high_freq_factor:
            return rate
        if wavelength > scaling.original_context / scaling.low_freq_factor:
            return rate / scaling.factor
        span = scaling.high_freq_factor - scaling.low_freq_factor
        smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / span
        return (1 - smooth) * rate / scaling.factor + smooth * rate

    def _weight(self, name: str) -> Floats:
        if name not in self._kept:
            self._kept[name] = self.weights(name)
        return self._kept[name]


def _rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Turn each pair (x[i], x[i + head_dim / 2]) by its angle."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far another greedy continuation follows the oracle's."""

    num_equal: int
    """Tokens before the first that differs."""
    different_at: int | None
    """Step of a difference that is an error; None if there is none."""
    tied_at: int | None
    """Step of a difference that is allowed, because two tokens were as good; None if there is none."""


def first_real_difference(oracle_logits: Floats, other_ids: Sequence[int], tie: float = 1e-4) -> Comparison:
    """Compare another continuation of the same prompt, token by token.

    A different token is allowed only where the oracle's two best logits are closer than `tie` and the
    token is within `tie` of the best; from there on the continuations have different pasts, so that the
    comparison ends.

    Args:
        oracle_logits: `[steps, vocab_size]`, from `OracleDecoder.greedy`.
        other_ids: the other continuation; fewer ids than steps compare as far as they go.
        tie: the largest difference of logits that counts as none.

    """
    for step, (row, other) in enumerate(zip(oracle_logits, other_ids, strict=False)):
        best = int(row.argmax())
        if other == best:
            continue
        if row[best] - row[other] < tie:
            return Comparison(step, different_at=None, tied_at=step)
        return Comparison(step, different_at=step, tied_at=None)
    return Comparison(min(len(oracle_logits), len(other_ids)), different_at=None, tied_at=None)
