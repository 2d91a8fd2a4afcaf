"""The shipped sets of prompts: chats that look like those of real use."""

import random
import tomllib
from collections.abc import Callable
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import Any

from streamsrv.bench.prompts import shipped_text
from streamsrv.client import ChatMessages

_LEAST_PARAGRAPHS, _MOST_PARAGRAPHS = 10, 18
_MOST_PIECES = 4
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_NAMES = (
    *("Ada", "Bruno", "Clara", "Dilip", "Elena", "Farid", "Greta", "Hamid", "Ines", "Jonas", "Kofi", "Lena"),
    *("Mei", "Noor", "Olga", "Pavel", "Rosa", "Samir", "Tilda", "Umar", "Vera", "Wanda", "Yusuf", "Zoe"),
)


class PromptSet(Enum):
    """A shipped set. All of its text was written for it."""

    CHAT = "chat"
    """Short conversations of one to three turns, each with a system turn of its own."""
    DOCUMENT = "document"
    """A question about a long document, put together of 10 to 18 paragraphs."""
    SHARED = "shared"
    """Questions behind one long system prompt, the same for all."""
    CODE = "code"
    """Questions about one to four pieces of code, in seven languages."""

    def make(self, seed: int, index: int) -> ChatMessages:
        """Make chat `index`, counted from 0; the same for the same seed.

        But for the system prompt of `SHARED`, no two begin alike beyond some words of their template: a date
        and a name stand first, so that no server can reuse the cache of one for another.
        """
        generator = random.Random(f"{self.value} {seed} {index}")  # noqa: S311 (no secret)
        return _MAKERS[self](_data(self), seed, index, generator)


def _chat(data: dict[str, Any], seed: int, index: int, generator: random.Random) -> ChatMessages:
    turns = _in_turn(data["dialogues"], seed, index)
    return [("system", f"{_moment(generator)} {data['system']}"), *((role, text) for role, text in turns)]


def _document(data: dict[str, Any], seed: int, index: int, generator: random.Random) -> ChatMessages:
    paragraphs = [*data["paragraphs"], *shipped_text().split("\n\n")]
    count = generator.randint(_LEAST_PARAGRAPHS, _MOST_PARAGRAPHS)
    document = "\n\n".join(text.strip() for text in generator.sample(paragraphs, count))
    task = _in_turn(data["tasks"], seed, index)
    return [
        ("system", f"{_moment(generator)} {data['system']}"),
        ("user", f"The document:\n\n{document}\n\nEnd of the document. {task}"),
    ]


def _shared(data: dict[str, Any], seed: int, index: int, generator: random.Random) -> ChatMessages:
    question = _in_turn(data["questions"], seed, index)
    name, number = generator.choice(_NAMES), generator.randrange(10_000, 100_000)
    return [("system", data["system"].strip()), ("user", f"{name} here, card {number}. {question}")]


def _code(data: dict[str, Any], seed: int, index: int, generator: random.Random) -> ChatMessages:
    pieces = generator.sample(data["pieces"], generator.randint(1, _MOST_PIECES))
    code = "\n\n".join(piece.strip() for piece in pieces)
    task = _in_turn(data["tasks"], seed, index)
    return [("system", f"{_moment(generator)} {data['system']}"), ("user", f"{task}\n\n{code}")]


_MAKERS: dict[PromptSet, Callable[[dict[str, Any], int, int, random.Random], ChatMessages]] = {
    PromptSet.CHAT: _chat,
    PromptSet.DOCUMENT: _document,
    PromptSet.SHARED: _shared,
    PromptSet.CODE: _code,
}


def _in_turn(items: list[Any], seed: int, index: int) -> Any:
    """Go round through the items in an order of the seed's."""
    return random.Random(seed).sample(items, len(items))[index % len(items)]  # noqa: S311 (no secret)


def _moment(generator: random.Random) -> str:
    hour, minute, day = generator.randrange(24), generator.randrange(60), generator.choice(_DAYS)
    number, name = generator.randrange(10_000), generator.choice(_NAMES)
    return f"{hour:02}:{minute:02}, {day}; conversation {number:04} with {name}."


@cache
def _data(prompt_set: PromptSet) -> dict[str, Any]:
    text = files("streamsrv.bench").joinpath("sets", f"{prompt_set.value}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
