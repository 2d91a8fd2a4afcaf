"""What guessing by what was said before brings to one stream: where it is made for, and where it is not."""

import statistics
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from streamsrv.bench.load import load_client
from streamsrv.bench.prompts import shipped_text
from streamsrv.bench.suite.asked import Asked, ask
from streamsrv.bench.suite.markdown import median_and_range, section
from streamsrv.bench.suite.server_process import server_process
from streamsrv.bench.suite.wire import QUESTIONS
from streamsrv.client import make_request

GOAL, FREE_GOAL = 1.5, 0.97
"""Of the tokens/s without guesses: rewriting, and in free text."""
_MAX_TOKENS = 128
_CODE = '''\
def total_price(items, tax):
    """Add up the prices of all items, and the tax."""
    total = 0
    for item in items:
        if item.price < 0:
            raise ValueError("a price is negative")
        total = total + item.price * item.count
    return total * (1 + tax)


def cheapest(items):
    """Find the item with the lowest price."""
    best = None
    for item in items:
        if best is None or item.price < best.price:
            best = item
    return best
'''
_NUM_PARAGRAPHS = 4
"""Of the shipped text, which are rewritten in turn."""


@dataclass(slots=True)
class _Task:
    """Something to ask, and the rounds in which it was asked without guesses and with them."""

    name: str
    prompts: Seq[str]
    """Asked in turn."""
    temperature: float
    rounds: list[tuple[Asked, Asked]] = field(default_factory=list)


def _tasks() -> list[_Task]:
    paragraphs = shipped_text().split("\n\n")[:_NUM_PARAGRAPHS]
    texts = [
        'Rewrite this text with the word "the" in capital letters. Change nothing else, and answer with '
        f"the text alone.\n\n{paragraph}"
        for paragraph in paragraphs
    ]
    code = (
        "Rewrite this Python module with the variable `items` renamed to `goods`. Change nothing else.\n\n"
        f"```python\n{_CODE}```"
    )
    return [
        _Task("rewriting a text, greedy", texts, 0.0),
        _Task("rewriting code, greedy", [code], 0.0),
        _Task("free text, greedy", QUESTIONS, 0.0),
        _Task("free text, temperature 0.8", QUESTIONS, 0.8),
    ]


async def lookup_section(model: str, num_rounds: int, say: Callable[[str], None]) -> str:
    """Ask with guesses and without in turn, so that a change in the machine's pace meets both."""
    tasks = _tasks()
    async with server_process("--model", model) as server, load_client(str(server.address)) as client:
        for number in range(-1, num_rounds):  # the first round warms up and is not counted
            for task in tasks:
                say(f"{task.name}, round {number + 1} of {num_rounds}")
                asked: dict[bool, Asked] = {}
                for guesses in (False, True) if number % 2 else (True, False):
                    request = make_request(
                        [("user", task.prompts[number % len(task.prompts)])],
                        max_tokens=_MAX_TOKENS,
                        min_tokens=_MAX_TOKENS // 4,
                        ignore_eos=task.prompts is QUESTIONS,
                        temperature=task.temperature,
                        seed=number % (1 << 32),
                        use_prefix_cache=False,  # it would change where a prompt's steps begin
                        prompt_lookup=guesses,
                    )
                    asked[guesses] = await ask(client, request)
                if number >= 0:
                    task.rounds.append((asked[False], asked[True]))
    return section(
        "Prompt lookup",
        f"One stream over gRPC, up to {_MAX_TOKENS} tokens: {_NUM_PARAGRAPHS} paragraphs and a module of "
        f"Python that the model is asked to repeat with one change, and {len(QUESTIONS)} questions to chat "
        f"about, in turn. Tokens/s behind the first, medians of {num_rounds} interleaved rounds; the ratio "
        "is the median of the rounds' ratios, with the least and the greatest. Right: the part of the "
        "guesses that the model agreed with. Equal: rounds in which both gave the same tokens; a step of "
        "several tokens is computed by other kernels than one of a single token, whose rounding differs. "
        f"Goal: at least {GOAL} times as fast at rewriting, and at least {FREE_GOAL} in free text.",
        ("task", "without", "with", "ratio", "guesses a token", "right, %", "equal"),
        [_row(task) for task in tasks],
    )


def _row(task: _Task) -> list[str]:
    without, guessing = zip(*task.rounds, strict=True)
    ratios = [b.decode_rate / a.decode_rate for a, b in task.rounds]
    num_guessed = sum(each.usage.num_guessed_tokens for each in guessing)
    num_right = sum(each.usage.num_accepted_tokens for each in guessing)
    num_equal = sum(a.token_ids == b.token_ids for a, b in task.rounds)
    return [
        task.name,
        f"{statistics.median(each.decode_rate for each in without):.0f}",
        f"{statistics.median(each.decode_rate for each in guessing):.0f}",
        median_and_range(ratios),
        f"{num_guessed / sum(len(each.token_ids) for each in guessing):.2f}",
        f"{num_right / num_guessed * 100:.0f}" if num_guessed else "-",
        f"{num_equal} of {len(task.rounds)}",
    ]
