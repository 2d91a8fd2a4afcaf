"""What it costs to hold outputs to a constraint."""

import secrets
import statistics
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engines.demo_model import model_path
from engines.registry import inspect_model
from streamsrv.bench.load import load_client
from streamsrv.bench.suite.asked import ask_all
from streamsrv.bench.suite.markdown import median_and_range, section
from streamsrv.bench.suite.server_process import server_process
from streamsrv.client import Client, make_request
from streamsrv.constraint.compiler import Constraint, ConstraintCompiler
from streamsrv.constraint.spec import ConstraintKind, ConstraintSpec

GOAL = 10.0
"""Per cent more time a token."""
_NUM_STREAMS, _MAX_TOKENS = 16, 96
_TOPICS = ("sailing boats", "a bakery", "old bridges", "pianos")

# Without an end before `_MAX_TOKENS`, so that all outputs are of one length.
_SCHEMA = """\
{
  "type": "object",
  "properties": {
    "people": {
      "type": "array",
      "minItems": 60,
      "items": {
        "type": "object",
        "properties": {
          "name": {"type": "string", "minLength": 3, "maxLength": 40},
          "age": {"type": "integer", "minimum": 0, "maximum": 120},
          "address": {
            "type": "object",
            "properties": {
              "street": {"type": "string", "minLength": 3, "maxLength": 60},
              "kind": {"enum": ["home", "work", "other"]}
            },
            "required": ["street", "kind"],
            "additionalProperties": false
          }
        },
        "required": ["name", "age", "address"],
        "additionalProperties": false
      }
    }
  },
  "required": ["people"],
  "additionalProperties": false
}"""
_NOTHING, _NESTED, _FREE = "nothing", "a schema of nested objects", "a schema of one long text"
_SPECS = {
    _NESTED: ConstraintSpec(ConstraintKind.JSON_SCHEMA, (_SCHEMA,)),
    _FREE: ConstraintSpec(ConstraintKind.JSON_SCHEMA, ('{"type": "string", "minLength": 2000}',)),
}


@dataclass(slots=True)
class _Rounds:
    """What was seen with one constraint."""

    token_s: list[float] = field(default_factory=list)
    """Time a token, in each round."""
    outputs: list[tuple[int, ...]] = field(default_factory=list)


async def constraint_section(model: str, num_rounds: int, say: Callable[[str], None]) -> str:
    """Ask with constraints and without in turn, so that a change in the machine's pace meets all."""
    rounds = {name: _Rounds() for name in (_NOTHING, *_SPECS)}
    async with server_process("--model", model) as server, load_client(str(server.address)) as client:
        for number in range(-1, num_rounds):  # the first round warms up and is not counted
            names = list(rounds) if number % 2 else list(reversed(rounds))
            for name in names:
                say(f"{_NUM_STREAMS} streams held to {name}, round {number + 1} of {num_rounds}")
                token_s, outputs = await _round(client, _SPECS.get(name))
                if number >= 0:
                    rounds[name].token_s.append(token_s)
                    rounds[name].outputs += outputs
    compiler = _compiler(model)
    return section(
        "Constrained outputs",
        f"{_NUM_STREAMS} streams over gRPC, {_MAX_TOKENS} tokens each behind equal prompts, temperature 0.8, "
        "and schemas that no output of this length completes: the time a token of a stream behind its "
        f"first, the mean of all, medians of {num_rounds} interleaved rounds; the ratio is the median of the "
        "rounds' ratios, with the least and the greatest. Forced: the part of the tokens that could be no "
        f"others, and that took no step of their own. Goal: less than {GOAL:.0f}% more than nothing.",
        ("held to", "ms a token", "ratio", "cost, %", "forced, %"),
        [
            _row(name, each, rounds[_NOTHING], _part_forced(compiler, _SPECS.get(name), each.outputs))
            for name, each in rounds.items()
        ],
    )


async def _round(client: Client, spec: ConstraintSpec | None) -> tuple[float, list[tuple[int, ...]]]:
    """Give the mean time a token, and the outputs."""
    requests = [
        make_request(
            [("user", f"Write about {_TOPICS[i % len(_TOPICS)]}, as JSON.")],
            json_schema=None if spec is None else spec.texts[0],
            max_tokens=_MAX_TOKENS,
            ignore_eos=spec is None,
            temperature=0.8,
            seed=secrets.randbits(32),
            prompt_lookup=False,
        )
        for i in range(_NUM_STREAMS)
    ]
    asked = await ask_all(client, requests)
    return statistics.mean(1 / each.decode_rate for each in asked), [each.token_ids for each in asked]


def _compiler(model: str) -> ConstraintCompiler:
    info = inspect_model(model_path(model))
    vocabulary = info.vocabulary
    return ConstraintCompiler(
        vocabulary.tokenizer_json, info.spec.vocab_size, sorted(vocabulary.eos_token_ids)
    )


def _part_forced(
    compiler: ConstraintCompiler, spec: ConstraintSpec | None, outputs: Seq[tuple[int, ...]]
) -> float:
    if spec is None:
        return 0.0
    constraint = compiler.compile(spec)
    num_forced = sum(count_forced(constraint, output) for output in outputs)
    return num_forced / sum(map(len, outputs))


def count_forced(constraint: Constraint, token_ids: Iterable[int]) -> int:
    """Count the tokens of an output that could be no others."""
    state = constraint.start()
    num_forced, num_coming = 0, 0
    for token_id in token_ids:
        state.accept(token_id)
        if num_coming:
            num_forced += 1
            num_coming -= 1
        if not num_coming:
            num_coming = len(state.forced_tokens())
    return num_forced


def _row(name: str, mine: _Rounds, base: _Rounds, part_forced: float) -> list[str]:
    ratios = [a / b for a, b in zip(mine.token_s, base.token_s, strict=True)]
    is_base = mine is base
    return [
        name,
        f"{statistics.median(mine.token_s) * 1000:.1f}",
        "1" if is_base else median_and_range(ratios),
        "-" if is_base else f"{(statistics.median(ratios) - 1) * 100:+.0f}",
        f"{part_forced * 100:.0f}",
    ]
