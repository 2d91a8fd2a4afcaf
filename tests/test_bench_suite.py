import json
import zlib

import numpy as np
from tokenizers import Tokenizer

from engines.api import StepBatch
from engines.scripted import ScriptedEngine
from streamsrv.bench.suite.asked import ask, ask_all
from streamsrv.bench.suite.constrained import count_forced
from streamsrv.bench.suite.direct_loop import DirectLoop, DirectTimes
from streamsrv.bench.suite.engines import engine_row
from streamsrv.bench.suite.markdown import section
from streamsrv.bench.suite.sampled import KINDS, choosing_times
from streamsrv.bench.suite.server_process import server_process
from streamsrv.bench.suite.sse import sse_response
from streamsrv.bench.suite.wire import Answer, measure_wire, record_answers
from streamsrv.client import Client, make_request
from streamsrv.constraint.compiler import ConstraintCompiler
from streamsrv.constraint.spec import ConstraintKind, ConstraintSpec
from tests.servers import running


def test_the_direct_loop_computes_each_prompt_once_and_one_token_less_than_it_yields() -> None:
    steps: list[StepBatch] = []
    engine = ScriptedEngine(before_step=steps.append)
    prompts = [[i + 3] * length for i, length in enumerate((50, 7, 20))]
    DirectLoop(engine.create_context(), max_step_tokens=32).run(prompts, max_tokens=5)
    assert [batch.num_tokens for batch in steps] == [32, 32, 13, 3, 3, 3, 3]
    assert [len(batch.logit_rows) for batch in steps] == [0, 2, 1, 3, 3, 3, 3]


def test_the_direct_loop_continues_each_sequence_by_its_own_token() -> None:
    steps: list[StepBatch] = []
    engine = ScriptedEngine(before_step=steps.append)
    script = engine.script_ids
    DirectLoop(engine.create_context(), max_step_tokens=64).run([script[:5], script[:9]], max_tokens=4)
    fed = np.array([batch.token_ids for batch in steps[1:]])
    assert fed.T.tolist() == [script[5:8], script[9:12]]


async def test_replayed_answers_arrive_in_chunks_of_exactly_the_size_asked_for() -> None:
    engine = ScriptedEngine()
    async with running(engine) as server:
        answers = await record_answers(server.client, ("one", "two"))
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    assert ["".join(answer.pieces) for answer in answers] == 2 * [(await _whole_text(engine))]
    for tokens_per_chunk in (1, 4, 8):
        row = await measure_wire(engine.model, answers, tokens_per_chunk=tokens_per_chunk, zstd=True)
        # All are full but each answer's first and last.
        most = sum(2 + (len(a.token_ids) - 1) // tokens_per_chunk for a in answers)
        assert num_tokens / most <= row.tokens_per_message <= tokens_per_chunk
        assert row.wire_bytes > row.message_bytes


async def _whole_text(engine: ScriptedEngine) -> str:
    async with running(engine) as server:
        return await server.client.generate("x", temperature=0.0).text()


async def test_the_same_answers_take_the_same_bytes_each_time() -> None:
    engine = ScriptedEngine()
    answer = Answer(tuple(engine.script_ids[:40]), ("x",) * 40, 3)
    rows = [await measure_wire(engine.model, [answer], tokens_per_chunk=1, zstd=False) for _ in range(2)]
    assert rows[0].message_bytes == rows[1].message_bytes


def test_an_sse_response_holds_the_text_and_is_well_formed() -> None:
    pieces = ("Grö", "", "ße 🙂", "\n")
    response = sse_response(pieces, model="m", finish_reason="stop", num_prompt_tokens=3)
    events = _events(_dechunked(response))
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    text = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert text == ["", "Grö", "ße 🙂", "\n", ""]
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_an_sse_response_through_gzip_says_the_same() -> None:
    pieces = ("a", "b") * 20
    plain, packed = (
        sse_response(pieces, model="m", finish_reason="stop", num_prompt_tokens=3, gzip=gzip)
        for gzip in (False, True)
    )
    assert zlib.decompress(_dechunked(packed), wbits=31) == _dechunked(plain)
    assert len(packed) < len(plain)


def _dechunked(response: bytes) -> bytes:
    head, _, rest = response.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]
        if not length:
            assert not rest
            return body


def _events(body: bytes) -> list[str]:
    lines = body.decode().split("\n\n")
    assert lines.pop() == ""
    return [line.removeprefix("data: ") for line in lines]


async def test_a_server_process_is_ready_inside_and_gone_after() -> None:
    async with server_process("--engine", "scripted") as server:
        async with Client(str(server.address)) as client:
            assert (await client.server_info()).engine == "scripted"
        assert 0 < server.resident_bytes() <= server.peak_resident_bytes()
        assert server.ready_s > 0


def test_engines_are_compared_round_by_round() -> None:
    runs = {
        "openvino": [DirectTimes(1.0, 2.0), DirectTimes(1.0, 4.0), DirectTimes(1.0, 8.0)],
        "other": [DirectTimes(1.0, 1.0), DirectTimes(1.0, 4.0), DirectTimes(1.0, 2.0)],
    }
    row = engine_row("1, decode", runs, lambda times: 80 / times.decode_s)
    assert row == ["1, decode", "20", "40", "**2.00** (1.00-4.00)"]


def test_a_section_is_a_markdown_table() -> None:
    text = section("Title", "How.", ("what", "n"), [["a", "1"]])
    assert text.splitlines() == ["### Title", "", "How.", "", "| what | n |", "| --- | --: |", "| a | 1 |"]


async def test_a_request_asked_tells_its_tokens_and_times() -> None:
    async with running(ScriptedEngine()) as server:
        asked = await ask(server.client, make_request("x", temperature=0.0, max_tokens=5, ignore_eos=True))
        both = await ask_all(server.client, [make_request("x", max_tokens=n) for n in (2, 3)])
    assert len(asked.token_ids) == asked.usage.num_completion_tokens == 5
    assert asked.first_token_s > 0
    assert asked.decode_rate > 0
    assert [len(each.token_ids) for each in both] == [2, 3]


def test_the_forced_tokens_of_an_output_are_counted_as_the_server_takes_them() -> None:
    model = ScriptedEngine().model
    vocabulary = model.vocabulary
    compiler = ConstraintCompiler(
        vocabulary.tokenizer_json, model.spec.vocab_size, sorted(vocabulary.eos_token_ids)
    )
    constraint = compiler.compile(ConstraintSpec(ConstraintKind.REGEX, ("[ab]xyz[ab]",)))
    state = constraint.start()
    encode = Tokenizer.from_str(vocabulary.tokenizer_json).encode
    (first,) = encode("a", add_special_tokens=False).ids
    state.accept(first)
    forced = state.forced_tokens()
    assert forced
    assert count_forced(constraint, [first, *forced]) == len(forced)
    assert count_forced(constraint, [first, *forced[:1]]) == 1


def test_each_way_of_choosing_is_timed_in_turn() -> None:
    steps: list[StepBatch] = []
    engine = ScriptedEngine(before_step=steps.append)
    times = choosing_times(engine, [[5, 6, 7], [8, 9]], num_rounds=2)
    assert {kind: len(each) for kind, each in times.items()} == dict.fromkeys(KINDS, 2)
    assert len(steps) == 2 + 3 * len(KINDS)  # a prompt's each, and a round to warm up
    assert steps[-1].past_lens.tolist() == [3 + 3 * len(KINDS) - 1, 2 + 3 * len(KINDS) - 1]
