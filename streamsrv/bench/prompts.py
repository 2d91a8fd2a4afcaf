"""Prompts of an exact length, no two of which begin alike."""

import math
import random
from collections.abc import Sequence as Seq
from importlib.resources import files

from streamsrv.bench.errors import BenchError
from streamsrv.client import Client
from streamsrv.v1 import inference_pb2 as pb


class PromptMaker:
    """Cuts prompts out of a tokenised text.

    A prompt begins with two tokens that no other one has in this order, so that no server can reuse the
    cache of one for another, and goes on with the text from a random place, around its end if need be.
    """

    def __init__(self, text_ids: Seq[int], num_tokens: int, seed: int) -> None:
        """`num_tokens` is the length of prompts that are asked for without one of their own.

        Equal texts and seeds give equal prompts.
        """
        self._text_ids = list(text_ids)
        self._num_tokens = num_tokens
        self._seed = seed
        self._distinct = sorted(set(self._text_ids))
        # Walks through all pairs in an order of the seed's: a stride without a common factor meets each once.
        generator = random.Random(seed)  # noqa: S311 (no secret)
        num_pairs = len(self._distinct) ** 2
        self._first = generator.randrange(num_pairs)
        self._stride = generator.randrange(num_pairs) | 1
        while math.gcd(self._stride, num_pairs) != 1:
            self._stride += 2

    @property
    def num_distinct(self) -> int:
        """How many prompts differ before they repeat; those of one token in fewer."""
        return len(self._distinct) ** 2

    def make(self, index: int, num_tokens: int | None = None) -> list[int]:
        """Give the ids of prompt `index`, counted from 0."""
        length = self._num_tokens if num_tokens is None else num_tokens
        pair = (self._first + index * self._stride) % self.num_distinct
        lead = [self._distinct[i] for i in divmod(pair, len(self._distinct))]
        begin = random.Random(f"{self._seed} {index}").randrange(len(self._text_ids))  # noqa: S311 (no secret)
        rounds = 1 + length // len(self._text_ids)
        text = self._text_ids[begin:] + rounds * self._text_ids
        return (lead + text)[:length]


def shipped_text() -> str:
    """Some 1,000 words of English prose, written for this."""
    return files("streamsrv.bench").joinpath("prose.txt").read_text(encoding="utf-8")


async def prompt_maker(client: Client, num_tokens: int, seed: int, model: str = "") -> PromptMaker:
    """Make prompts of the shipped text in the tokens of the server's model.

    Raises:
        CallFailedError: the server could not be asked.
        BenchError: its tokenizer makes too few different tokens of the text.
    """
    # Without the model's own first token: a prompt shall be as long as was asked.
    prompt = pb.Prompt(text=shipped_text(), add_special_tokens=False)
    ids = await client.tokenize(prompt, model=model)
    if len(set(ids)) < 2:
        raise BenchError(f"the server's tokenizer makes only {len(set(ids))} different tokens of the text")
    return PromptMaker(ids, num_tokens, seed)
