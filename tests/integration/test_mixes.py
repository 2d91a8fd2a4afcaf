"""Whatever else is computed, and however: a request gets what it gets alone."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engines.api import Engine
from engines.options import CacheType, EngineOptions, Precision, WeightFormat
from engines.registry import open_engine
from engines.scripted import ScriptedEngine
from streamsrv.chunks import ChunkDecoder
from streamsrv.client import Client, make_request
from streamsrv.client.output import output_index_of
from streamsrv.errors import CallFailedError
from streamsrv.v1 import inference_pb2 as pb
from tests import constrained, tiny
from tests.conftest import TinyPaths
from tests.constrained import draw_output
from tests.golden.chats import TEMPLATES
from tests.mixes import (
    CONSTRAINTS,
    SCHEMA,
    Ask,
    Count,
    Told,
    Words,
    compare,
    draw_ask,
    preempted_at_random,
    recorded,
    tell,
)
from tests.schemas import SCHEMAS
from tests.schemas.formats import FORMATS
from tests.servers import running

EXACT = EngineOptions(
    WeightFormat.FLOAT32, Precision.F32, CacheType.F32, max_batch=8, num_contexts=2, cache_gib=0.01
)
FORMS = {
    "paged": ("openvino", EXACT),
    "linear": ("onnxruntime", EXACT),
    "grouped": ("onnxruntime", replace(EXACT, precision=Precision.AUTO)),
}
BEGINNINGS = (
    "The river carried the little boats past the town, and the children on the bank waved at them until "
    "the last sail had turned the corner. ",
    "In the evening the boats would come back with the tide, and the children would be there again. ",
)
ENDS = ("and the water ", "x y z x y z x y z ", "1, 2, 3, ", "on the hills. ", "東京 🙂 ", "q")
WORDS = Words(BEGINNINGS, ENDS, tiny.LLAMA_TIED.vocab_size)


@dataclass(frozen=True, slots=True)
class Engines:
    """A model with a cache that is large, and with one that is not."""

    large: Engine
    small: Engine
    words: Words


@pytest.fixture(scope="module", params=FORMS)
def engines(
    request: pytest.FixtureRequest,
    tiny_models: dict[str, TinyPaths],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engines]:
    """Compute in float32."""
    name, options = FORMS[request.param]
    pytest.importorskip(name)
    path, cache = tiny_models[tiny.LLAMA_TIED.name].gguf, tmp_path_factory.mktemp("cache")
    options = replace(options, cache_folder=cache)
    large = open_engine(name, path, options)
    # Of eight small blocks or of one row.
    cache_gib = 0.0002 if name == "openvino" else 0.00025
    small = open_engine(name, path, replace(options, cache_gib=cache_gib, max_context=160))
    yield Engines(large, small, WORDS)
    large.close()
    small.close()


async def run_mix(engines: Engines, asks: list[Ask], seed: int, count: Count) -> None:
    """Hold a mix of requests, run in any way that servers may run it, against each one's plain run."""
    draw = random.Random(f"{seed} settings")
    plain = []
    async with running(engines.large, prefix_cache=False, prompt_lookup=False, max_step_tokens=512) as server:
        for ask in asks:
            with recorded() as choices:
                plain.append((await tell(server.client, ask), choices))
    max_running = draw.choice([2, 4, 8])
    engine = engines.small if draw.random() < 0.4 else engines.large
    preempts = preempted_at_random(draw) if draw.random() < 0.7 else nullcontext()
    with preempts:
        async with running(
            engine,
            max_running=max_running,
            max_step_tokens=draw.choice([max_running, 11, 32, 64]) if max_running < 11 else 64,
            workers=draw.choice([1, 2]),
        ) as server:

            async def ask_at(place: int) -> Told:
                await asyncio.sleep(pauses[place])
                return await tell(server.client, asks[place])

            pauses = [draw.choice([0, draw.uniform(0, 0.1)]) for _ in asks]
            told = await asyncio.gather(*(ask_at(i) for i in range(len(asks))))
            count.num_preempted += server.pool.state().counters.num_preemptions
    for ask, (expected, choices), other in zip(asks, plain, told, strict=True):
        try:
            compare(expected, choices, other, count)
        except AssertionError as error:
            error.add_note(f"mix {seed}: {ask}")
            raise


def random_mix(words: Words, seed: int, num: int, max_tokens: int = 40) -> list[Ask]:
    draw = random.Random(f"{seed} asks")
    return [draw_ask(draw, words, max_tokens=max_tokens) for _ in range(num)]


async def run_mixes(engines: Engines, seeds: range, max_tokens: int = 40) -> Count:
    """Run mixes of few requests, whose tokens are guessed, and of many, in turn."""
    count = Count()
    for seed in seeds:
        num = 3 if seed % 2 else 15
        await run_mix(engines, random_mix(engines.words, seed, num, max_tokens), seed, count)
    print(count)
    return count


async def test_a_few_random_mixes_tell_what_plain_runs_tell(engines: Engines) -> None:
    count = await run_mixes(engines, range(8))
    assert count.num_asked == 72
    assert count.num_preempted > 50
    assert count.num_cached > 50
    assert count.num_accepted > 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_200_random_mixes_tell_what_plain_runs_tell(engines: Engines) -> None:
    count = await run_mixes(engines, range(1000, 1200))
    assert count.num_tied < count.num_tokens / 1000


# ---------------------------------------------------------------------------------------------------------
# One of each kind

EACH: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.2, "top_p": 0.9},
    "typical": {"temperature": 1, "typical_p": 0.7, "min_p": 0.01},
    "penalised": {
        "temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3,
    },
    "biased": {"temperature": 1, "logit_bias": {9: 4.0, 50: -8.0}, "banned_token_ids": [1, 2, 70]},
    "by schema": {"temperature": 1, "json_schema": SCHEMA},
    "by regex": {"temperature": 0, "regex": r"(the |river |town )+\."},
    "by choices": {"temperature": 1, "choices": ["the river", "the town", "a boat"], "logprobs": True},
    "logprobs": {"temperature": 0, "logprobs": True},
    "top logprobs": {"temperature": 1, "num_top_logprobs": 5},
    "four": {"temperature": 1, "num_outputs": 4, "logprobs": True},
    "prompt logprobs": {"temperature": 0, "prompt_logprobs": True, "num_top_logprobs": 3},
    "echo": {"temperature": 1, "echo": True},
    "stopped": {"temperature": 1, "stop": ["e", "th"], "min_tokens": 5},
}  # fmt: skip


async def test_each_row_of_a_mixed_batch_is_that_of_its_run_alone(engines: Engines) -> None:
    asks = [
        Ask(f"{BEGINNINGS[i % 2]}{ENDS[i % len(ENDS)]}", {"seed": i, "max_tokens": 32, **options})
        for i, options in enumerate(EACH.values())
    ]
    alone, count = [], Count()
    async with running(engines.large) as server:
        for ask in asks:
            with recorded() as choices:
                alone.append((await tell(server.client, ask), choices))
    async with running(engines.large) as server:
        together = await asyncio.gather(*(tell(server.client, ask) for ask in asks))
    for (expected, choices), told in zip(alone, together, strict=True):
        compare(expected, choices, told, count)
    assert (count.num_asked, count.num_failed) == (len(EACH), 0)
    assert count.num_tied == 0


# ---------------------------------------------------------------------------------------------------------
# Constraints

FORCED: dict[str, Any] = {"choices": ["the river and the town"]}
"""All of it is."""


async def outputs_of(client: Client, prompt: str, **options: Any) -> list[tuple[list[int], str, str | None]]:
    stream = client.generate(prompt, **{"max_tokens": 60, "seed": 3, **options})
    await stream.text()
    return [(output.token_ids, output.text, output.finish_reason) for output in stream.outputs]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("constraint", [FORCED, *CONSTRAINTS])
async def test_tokens_that_are_forced_are_those_that_would_be_chosen(
    engines: Engines, constraint: dict[str, Any], temperature: float
) -> None:
    """With logprobs each has a step of its own."""
    sampling = {"temperature": temperature, "repetition_penalty": 1.2, "num_outputs": 2, **constraint}
    async with running(engines.large) as server:
        at_once = await outputs_of(server.client, "x", **sampling)
        steps_at_once = server.pool.num_steps
        one_by_one = await outputs_of(server.client, "x", logprobs=True, **sampling)
        steps_one_by_one = server.pool.num_steps - steps_at_once
    assert at_once == one_by_one
    if constraint is FORCED:
        assert at_once[0][2] == "STOP"
        assert steps_at_once < steps_one_by_one


@pytest.mark.parametrize("logprobs", [False, True])
async def test_a_forced_token_that_is_banned_leaves_nothing(engines: Engines, logprobs: bool) -> None:
    options = {"temperature": 1, "logprobs": logprobs, **FORCED}
    async with running(engines.large) as server:
        [(ids, text, _)] = await outputs_of(server.client, "x", **options)
        assert text == FORCED["choices"][0]
        for forced in ids:
            with pytest.raises(CallFailedError, match="nothing may follow") as caught:
                await outputs_of(server.client, "x", banned_token_ids=[forced], **options)
            assert caught.value.server_reason == "NOTHING_ALLOWED"
            others = [token_id for token_id in ids if token_id != forced]
            with pytest.raises(CallFailedError, match="nothing may follow"):
                await outputs_of(server.client, "x", allowed_token_ids=others, **options)
        allowed = await outputs_of(server.client, "x", allowed_token_ids=ids, **options)
        assert allowed == [(ids, text, "STOP")]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"regex": "(a"}, "constraint.regex"),
        ({"json_schema": {"type": "strange"}}, "constraint.json_schema"),
        ({"json_schema": "{"}, "constraint.json_schema"),
        ({"lark": "start: missing"}, "constraint.lark"),
        ({"regex": "a+", "stop": ["b"]}, "stop.stop"),
        ({"regex": "a+", "min_tokens": 2}, "stop.min_tokens"),
        ({"regex": "a+", "ignore_eos": True}, "stop.ignore_eos"),
        ({"regex": "a+", "stop_token_ids": [5]}, "stop.stop_token_ids"),
    ],
)
async def test_a_constraint_that_cannot_be_followed_is_refused_with_its_field(
    options: dict[str, Any], field: str
) -> None:
    async with running() as server:
        with pytest.raises(CallFailedError, match=field) as caught:
            await server.client.generate("x", **options).text()
        assert caught.value.code == "INVALID_ARGUMENT"


# ---------------------------------------------------------------------------------------------------------
# The demo model


@pytest.fixture(scope="module")
def demo(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """As it is served by default."""
    pytest.importorskip("openvino")
    cache = tmp_path_factory.mktemp("cache")
    engine = open_engine("openvino", demo_path, EngineOptions(cache_gib=0.5, cache_folder=cache))
    yield engine
    engine.close()


DEMO_WORDS = Words(
    (
        "You are a helpful assistant. Answer in one sentence, in the language of the question, and do not "
        "make anything up. Question: ",
        "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n    return a - b\n\n",
    ),
    ("What is the capital of France? ", "def multiply(a, b):\n", "Repeat: one two three, one two three, one ",
     "Once upon a time", "東京 🙂 ", "1, 2, 3, 4, "),
    49152,
)  # fmt: skip
SCHEMA_NAMES = ["sentiment", "person", "address", "contact"]


@pytest.mark.slow
async def test_json_of_the_demo_model_is_valid_or_the_beginning_of_what_is(
    demo: Engine, demo_path: Path
) -> None:
    draw, rig = random.Random(5), constrained.demo(demo_path)
    cases = [case for case in SCHEMAS if case.name in SCHEMA_NAMES]
    cases += draw.sample(SCHEMAS, 15 - len(cases))
    async with running(demo, max_running=16) as server:
        streams = [
            server.client.generate(
                [("user", f"Give me an example of {case.name} as JSON.")],
                json_schema=case.text, max_tokens=80 if i % 3 else 12, temperature=i % 2, seed=i,
                repetition_penalty=1.0 + 0.1 * (i % 2),
            )
            for i, case in enumerate(cases)
        ]  # fmt: skip
        await asyncio.gather(*(stream.text() for stream in streams))
    reasons = Counter(stream.finish_reason for stream in streams)
    assert reasons["STOP"] >= 4
    assert reasons["LENGTH"] >= 3
    for stream, case in zip(streams, cases, strict=True):
        text = stream.received_text
        if stream.finish_reason != "STOP":
            state = rig.start("json_schema", case.text)
            for token_id in stream.token_ids:
                state.accept(token_id)
            rest = draw_output(rig, state, draw, num_free=0, begun=text.encode())
            text = rig.tokenizer.decode([*stream.token_ids, *rest.token_ids])
        made = jsonschema.validators.validator_for(case.schema, default=jsonschema.Draft202012Validator)
        made(case.schema, format_checker=FORMATS).validate(json.loads(text))


@pytest.fixture(scope="module")
def exact_demo(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Compute in float32."""
    pytest.importorskip("openvino")
    cache = tmp_path_factory.mktemp("exact")
    engine = open_engine(
        "openvino", demo_path, replace(EXACT, cache_folder=cache, cache_gib=0.25, max_context=512)
    )
    yield engine
    engine.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_20_random_mixes_of_the_demo_model_tell_what_plain_runs_tell(exact_demo: Engine) -> None:
    count = await run_mixes(Engines(exact_demo, exact_demo, DEMO_WORDS), range(20))
    assert count.num_tied < count.num_tokens / 200


@pytest.mark.slow
async def test_tokens_that_are_forced_are_those_that_the_demo_model_would_choose(exact_demo: Engine) -> None:
    async with running(exact_demo, max_running=16) as server:
        for case in random.Random(6).sample(SCHEMAS, 15):
            greedy = {"temperature": 0, "json_schema": case.text, "max_tokens": 40}
            at_once = await outputs_of(server.client, f"An example of {case.name}: ", **greedy)
            assert at_once == await outputs_of(
                server.client, f"An example of {case.name}: ", logprobs=True, **greedy
            )


# ---------------------------------------------------------------------------------------------------------
# Tools

CALLS = (
    'I look. <tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n and then '
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call> done 🙂.'
)


def calling(script: str = CALLS, template: str = "hermes") -> ScriptedEngine:
    """Make an engine that calls tools as a family does, whatever it is asked."""
    engine, source = ScriptedEngine(script), (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    model = engine._model
    engine._model = replace(model, vocabulary=replace(model.vocabulary, chat_template=source))
    return engine


def offer() -> pb.Prompt:
    tools = [
        pb.Tool(name=name, parameters_json_schema='{"type": "object", "properties": {}}')
        for name in ("weather", "time")
    ]
    return pb.Prompt(
        chat=pb.Chat(messages=[pb.ChatMessage(role=pb.ROLE_USER, content="Where?")], tools=tools)
    )


def kinds(events: Iterable[pb.Event]) -> list[str]:
    """Give the events' texts in order, and the calls among them."""
    told: list[str] = []
    for event in events:
        if event.HasField("tool_call"):
            call = event.tool_call.call
            told.append(f"{call.name} {call.arguments_json}")
        elif (text := event.tokens.text + event.output_end.text).strip():
            told.append(text)
    return told


@pytest.mark.parametrize("most", [1, 3, None])
async def test_calls_of_tools_stand_where_they_were_made_and_text_around_them_stays(
    most: int | None,
) -> None:
    engine = calling()
    async with running(engine) as server:
        stream = server.client.generate(offer(), max_tokens_per_chunk=most, num_outputs=2)
        events = [event async for chunk in stream for event in chunk.events]
    for output in stream.outputs:
        told = kinds(event for event in events if output_index_of(event) == output.index)
        first, second = (i for i, part in enumerate(told) if part.startswith(("weather {", "time {")))
        assert json.loads(told[first].removeprefix("weather ")) == {"city": "Köln"}
        assert json.loads(told[second].removeprefix("time ")) == {}
        assert "".join(told[:first]).split() == ["I", "look."]
        assert "".join(told[first + 1 : second]).split() == ["and", "then"]
        assert "".join(told[second + 1 :]).split() == ["done", "🙂."]
        assert output.token_ids == [*engine.script_ids, engine.eos_token_id]
        assert output.finish_reason == "STOP"
        assert [call.name for call in output.tool_calls] == ["weather", "time"]
        assert len({call.id for call in output.tool_calls}) == 2
    assert stream.usage is not None
    assert stream.usage.num_completion_tokens == 2 * (len(engine.script_ids) + 1)


@pytest.mark.parametrize("tail", ["", " Bye now."])
async def test_text_in_the_token_that_ends_a_call_comes_after_the_call(tail: str) -> None:
    engine = calling('[TOOL_CALLS] [{"name": "time", "arguments": {}}]bye' + tail, "mistral")
    async with running(engine) as server:
        stream = server.client.generate(offer())
        events = [event async for chunk in stream for event in chunk.events]
    call, *texts = kinds(events)
    assert call.startswith("time {")
    assert "".join(texts) == "bye" + tail


async def read(call: Any) -> tuple[pb.StreamStart, str, list[pb.Event]]:
    """Read a call to its end."""
    decoder, start, stream_id = ChunkDecoder(), pb.StreamStart(), ""
    events: list[pb.Event] = []
    async for message in call:
        if message.WhichOneof("payload") == "start":
            start, stream_id = message.start, message.stream_id
        events += decoder.decode(message).events
    return start, stream_id, events


async def test_a_stream_with_calls_goes_on_from_any_position() -> None:
    async with running(calling()) as server:
        request = make_request(offer(), resume_window_s=20, max_tokens_per_chunk=1)
        start, stream_id, whole = await read(server.client.stub.Generate(request))
        assert not any(event.num_positions > 1 for event in whole)
        assert len([event for event in whole if event.HasField("tool_call")]) == 2
        for position in range(len(whole)):
            call = server.client.stub.Resume(
                pb.ResumeRequest(
                    stream_id=stream_id,
                    resume_token=start.resume_token,
                    position=position,
                    stream=pb.StreamOptions(
                        max_tokens_per_chunk=1, accepted_codecs=[pb.CODEC_ZSTD] if position % 2 else []
                    ),
                )
            )
            assert (await read(call))[2] == whole[position:]
