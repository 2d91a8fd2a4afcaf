"""An engine that computes nothing: it replays a text, at a given pace.

It keeps a real cache of cells in real blocks and reads its state from there, so whatever schedules it is
checked as by a model: a wrong block, a lost or repeated token is an EngineError or a wrong text. Load runs
of the front end and most tests use it.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engines.api import CacheSpec, EngineError, IntArray, StepBatch, StepResult
from engines.spec import Family, ModelInfo, ModelSpec, Vocabulary

DEFAULT_SCRIPT = (
    "A stream is a log, and a reader is a cursor in it. Whoever reads slowly gets fewer and bigger pieces; "
    "whoever loses the line comes back to where it was. Nothing is said twice, and nothing is left out. "
    "Of all that a server can promise about words that are still being made, this is the least, and it is "
    "the part that is most often broken: a word that was never sent, a word that was sent two times, or a "
    "silence that nobody explains. Größe, naïve, 東京, 🙂 and 👩‍🔬 are words too."
)

_BOS, _EOS, _TURN = "<|begin|>", "<|end|>", "<|turn|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }}\n{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
_CONTEXT_LENGTH = 8192
_CHOSEN, _SECOND, _OTHER = 0.0, -5e3, -1e4  # so far apart that no temperature up to 100 mixes them


def _byte_alphabet() -> list[str]:
    """List the characters that stand for the bytes 0 to 255 in byte-level BPE.

    Source: `bytes_to_unicode` of GPT-2: printable Latin-1 bytes stand for themselves, all others, in order,
    for the code points from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _tokenizer_json(script: str) -> tuple[str, list[int], int]:
    """Make a byte-level tokenizer that has each word of the script as a token.

    Returns its JSON, the script's ids, and the id of the end-of-text token.
    """
    alphabet = _byte_alphabet()
    vocab = {token: i for i, token in enumerate([_BOS, _EOS, _TURN, *alphabet])}
    ids = []
    for word in re.findall(r" ?\S+|\s", script):
        token = "".join(alphabet[byte] for byte in word.encode())
        if len(word) > 8:  # some words in pieces, so that characters are cut, as real vocabularies do
            ids += [vocab[character] for character in token]
        else:
            ids.append(vocab.setdefault(token, len(vocab)))
    added = [
        {
            "id": vocab[token],
            "content": token,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for token in (_BOS, _EOS, _TURN)
    ]
    words = {"type": "Split", "pattern": {"Regex": r" ?\S+|\s"}, "behavior": "Isolated", "invert": False}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, to_bytes]},
        "decoder": to_bytes,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": True},
    }
    return json.dumps(tokenizer), ids, vocab[_EOS]


def _model_info(script: str, tokenizer_json: str, eos: int, vocab_size: int) -> ModelInfo:
    return ModelInfo(
        path="",
        revision=hashlib.sha256(script.encode()).hexdigest(),
        size_bytes=0,
        quantization="none",
        spec=ModelSpec(
            family=Family.LLAMA,
            name="scripted",
            vocab_size=vocab_size,
            hidden_size=0,
            num_layers=0,
            num_heads=0,
            num_kv_heads=0,
            head_dim=0,
            intermediate_size=0,
            context_length=_CONTEXT_LENGTH,
            rms_eps=0.0,
            rope_theta=0.0,
            rope_scaling=None,
            tied_embeddings=True,
            qkv_bias=False,
            qk_norm=False,
        ),
        vocabulary=Vocabulary(
            tokenizer_json=tokenizer_json,
            bos_token=_BOS,
            eos_token=_EOS,
            eos_token_ids=(eos,),
            chat_template=_CHAT_TEMPLATE,
        ),
    )


class ScriptedEngine:
    """Answers every prompt with the script and an end-of-text token.

    A prompt that ends with the script's beginning is continued from there.
    """

    name = "scripted"

    def __init__(
        self,
        script: str = DEFAULT_SCRIPT,
        *,
        step_s: float = 0.0,
        num_blocks: int = 8192,
        block_size: int = 16,
        before_step: Callable[[StepBatch], None] | None = None,
    ) -> None:
        """A step takes `step_s` seconds; `before_step` is called on the worker's thread before each."""
        if not script.strip():
            raise EngineError("the script is empty; give some text to replay")
        tokenizer_json, self.script_ids, self.eos_token_id = _tokenizer_json(script)
        self.vocab_size = len(json.loads(tokenizer_json)["model"]["vocab"])
        self._model = _model_info(script, tokenizer_json, self.eos_token_id, self.vocab_size)
        self._cache = CacheSpec(num_blocks, block_size, bytes_per_block=8 * block_size)
        self._step_s = step_s
        self._before_step = before_step

    @property
    def model(self) -> ModelInfo:
        """A description of the script as if it were a model."""
        return self._model

    def create_context(self) -> "ScriptedContext":
        """Make a context with an empty cache."""
        return ScriptedContext(
            self._cache, self.script_ids, self.eos_token_id, self.vocab_size, self._step_s, self._before_step
        )

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


class ScriptedContext:
    """A cache whose cells hold, for each token, its position and how much of the script it completes."""

    num_candidates = 0

    def __init__(
        self,
        cache: CacheSpec,
        script_ids: list[int],
        eos_token_id: int,
        vocab_size: int,
        step_s: float,
        before_step: Callable[[StepBatch], None] | None,
    ) -> None:
        self._cache = cache
        self._script = script_ids
        self._replies = np.array([*script_ids, eos_token_id])
        self._expected = np.array([*script_ids, -1])  # after the whole script nothing goes on with it
        self._fallbacks = _prefix_function(script_ids)
        self._vocab_size = vocab_size
        self._step_s = step_s
        self._before_step = before_step
        self._positions = np.full((cache.num_blocks, cache.block_size), -1, np.int32)
        self._states = np.zeros((cache.num_blocks, cache.block_size), np.int32)
        self._offsets = np.arange(cache.block_size, dtype=np.int32)

    @property
    def cache(self) -> CacheSpec:
        """The cache's size."""
        return self._cache

    def step(self, batch: StepBatch) -> StepResult:
        """Write the new tokens' cells, and choose each wanted row's reply.

        Raises:
            EngineError: the batch breaks a promise of StepBatch.
        """
        if self._before_step is not None:
            self._before_step(batch)
        if self._step_s:
            time.sleep(self._step_s)
        # As unsigned numbers negative ids are large ones.
        if batch.num_tokens and batch.token_ids.view(np.uint64).max() >= self._vocab_size:
            raise EngineError(f"a token id is outside 0 .. {self._vocab_size - 1}")
        for copy in batch.copies:
            for cells in (self._positions, self._states):
                cells[copy.target, : copy.num_tokens] = cells[copy.source, : copy.num_tokens]
        state_after = self._write(batch)
        rows = batch.logit_rows
        logits = np.full((len(rows), self._vocab_size), _OTHER, np.float32)
        logits[:, self._script[0]] = _SECOND
        logits[np.arange(len(rows)), self._replies[state_after[rows]]] = _CHOSEN
        return StepResult(logits)

    def close(self) -> None:
        """Do nothing: the cache is ordinary memory."""

    def _write(self, batch: StepBatch) -> NDArray[np.int32]:
        """Write the new tokens' cells; gives how much of the script each of them completes."""
        size, pasts, begins = self._cache.block_size, batch.past_lens, batch.query_begins
        firsts, nums_blocks = batch.block_begins[:-1], batch.block_begins[1:] - batch.block_begins[:-1]
        nums_new = begins[1:] - begins[:-1]
        missing = nums_blocks * size < pasts + nums_new
        if missing.any():
            b = int(missing.argmax())
            raise EngineError(
                f"sequence {b} has cells for {nums_blocks[b] * size} tokens, needs {pasts[b] + nums_new[b]}"
            )
        # [blocks, size] which of its sequence's tokens each cell is for, and which it holds.
        numbers = np.arange(len(batch.block_ids)) - np.repeat(firsts, nums_blocks)
        places = (numbers * size)[:, None] + self._offsets
        wrong = self._positions[batch.block_ids] != places
        wrong &= places < np.repeat(pasts, nums_blocks)[:, None]
        if wrong.any():
            block = int(wrong.any(axis=1).argmax())
            b = int(np.searchsorted(firsts, block, side="right")) - 1
            raise EngineError(f"the cache of sequence {b} does not hold its {pasts[b]} past tokens")
        states = self._states[self._cells(batch, firsts, np.maximum(pasts - 1, 0))] * (pasts > 0)
        after = self._advance_all(states, batch.token_ids, begins, nums_new)
        places = pasts
        if batch.num_tokens > len(pasts):  # nearly always each has one new token
            places = np.repeat(pasts, nums_new) + _ranges(nums_new)
            firsts = np.repeat(firsts, nums_new)
        cells = self._cells(batch, firsts, places)
        self._positions[cells] = places
        self._states[cells] = after
        return after

    def _cells(self, batch: StepBatch, firsts: IntArray, places: IntArray) -> tuple[IntArray, IntArray]:
        """The cells of some tokens: block, and place in it. `firsts` is where their blocks begin."""
        blocks, offsets = np.divmod(places, self._cache.block_size)
        return batch.block_ids[firsts + blocks], offsets

    def _advance_all(
        self, states: NDArray[np.int32], token_ids: NDArray[np.int64], begins: IntArray, nums_new: IntArray
    ) -> NDArray[np.int32]:
        """How much of the script each new token completes, after the `states` of the sequences."""
        if len(token_ids) == len(states) and (self._expected[states] == token_ids).all():
            return states + 1  # nearly always one token that goes on with the script
        after = np.zeros(len(token_ids), np.int32)
        firsts = begins[:-1]
        goes_on = (nums_new == 1) & (self._expected[states] == token_ids[firsts])
        after[firsts[goes_on]] = states[goes_on] + 1
        for b in np.flatnonzero(~goes_on):
            state = int(states[b])
            for i in range(begins[b], begins[b + 1]):
                state = self._advance(state, int(token_ids[i]))
                after[i] = state
        return after

    def _advance(self, state: int, token_id: int) -> int:
        # Knuth, Morris and Pratt: the longest suffix of all tokens so far that begins the script.
        while state and (state == len(self._script) or self._script[state] != token_id):
            state = self._fallbacks[state - 1]
        return state + 1 if self._script[state] == token_id else state


def _ranges(sizes: IntArray) -> NDArray[np.int64]:
    """Count from 0 up to each size, end to end."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - sizes, sizes)


def _prefix_function(tokens: list[int]) -> list[int]:
    fallbacks = [0] * len(tokens)
    for i in range(1, len(tokens)):
        k = fallbacks[i - 1]
        while k and tokens[i] != tokens[k]:
            k = fallbacks[k - 1]
        fallbacks[i] = k + 1 if tokens[i] == tokens[k] else k
    return fallbacks
