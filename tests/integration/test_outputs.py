"""Several outputs of one request over gRPC."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engines.api import Engine
from engines.checkpoint import open_checkpoint
from engines.registry import open_engine
from engines.scripted import ScriptedEngine
from streamsrv.client import Client, Generation
from streamsrv.client.output import output_index_of
from streamsrv.errors import CallFailedError
from tests import tiny
from tests.conftest import TinyPaths
from tests.integration.test_service import Gate
from tests.oracle import OracleDecoder
from tests.servers import running
from tests.trt_rig import in_cache

NUM = 4
MAX_TOKENS = 20
PROMPT = "once upon a time"


@pytest.fixture(scope="module", params=["openvino", "onnxruntime"])
def engine(
    request: pytest.FixtureRequest,
    tiny_models: dict[str, TinyPaths],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    """Compute in float32."""
    pytest.importorskip(request.param)
    path, options = tiny_models[tiny.LLAMA_TIED.name].gguf, in_cache(tmp_path_factory.mktemp("cache"))
    engine = open_engine(request.param, path, options)
    yield engine
    engine.close()


def generate(client: Client, prompt: str = PROMPT, **options: Any) -> Generation:
    return client.generate(
        prompt, **{"max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": 11, "num_outputs": NUM, **options}
    )


async def ids_of(stream: Generation) -> list[list[int]]:
    await stream.text()
    return [output.token_ids for output in stream.outputs]


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.5},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 2, "top_k": 20, "typical_p": 0.9, "logit_bias": {5: 4.0}},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_the_first_is_that_of_a_request_for_one_and_the_others_are_their_own(
    engine: Engine, sampling: dict[str, Any]
) -> None:
    async with running(engine, max_running=8, max_step_tokens=64) as server:
        alone = await ids_of(generate(server.client, num_outputs=1, **sampling))
        several = await ids_of(generate(server.client, **sampling))
        fewer = await ids_of(generate(server.client, num_outputs=2, **sampling))
    assert several[0] == alone[0]
    assert several[:2] == fewer
    assert len({tuple(ids) for ids in several}) == NUM
    assert all(len(ids) == MAX_TOKENS for ids in several)


async def test_they_are_the_same_in_any_batch(engine: Engine) -> None:
    async with running(engine, max_running=8, max_step_tokens=64) as server:
        quiet = [await ids_of(generate(server.client, **sampling)) for sampling in SAMPLINGS]
        crowded = await asyncio.gather(
            *(ids_of(generate(server.client, **sampling)) for sampling in SAMPLINGS),
            *(ids_of(generate(server.client, "x y " * n, seed=n, temperature=1)) for n in range(1, 5)),
        )
    assert crowded[: len(SAMPLINGS)] == quiet


async def test_penalties_look_at_the_prompt_and_at_each_outputs_own_tokens(
    engine: Engine, tiny_models: dict[str, TinyPaths]
) -> None:
    penalty, presence, frequency = (np.float32(value) for value in (1.2, 0.5, 0.25))
    async with running(engine, max_running=8, max_step_tokens=64) as server:
        prompt_ids = await server.client.tokenize(PROMPT)
        several = await ids_of(
            generate(
                server.client,
                temperature=0,
                num_outputs=2,
                repetition_penalty=float(penalty),
                presence_penalty=float(presence),
                frequency_penalty=float(frequency),
            )
        )
    with open_checkpoint(tiny_models[tiny.LLAMA_TIED.name].gguf) as checkpoint:
        decoder, expected = OracleDecoder(checkpoint.tensor, checkpoint.info.spec), list[int]()
        for _ in range(MAX_TOKENS):
            row = decoder.logits([*prompt_ids, *expected])[-1]
            for token_id in {*prompt_ids, *expected}:
                row[token_id] *= penalty if row[token_id] < 0 else 1 / penalty
                count = expected.count(token_id)
                row[token_id] -= frequency * count + presence * (count > 0)
            expected.append(int(row.argmax()))
    assert several == [expected, expected]
    assert len(set(expected)) > MAX_TOKENS // 2


async def test_greedy_ones_are_all_equal(engine: Engine) -> None:
    async with running(engine, max_running=8, max_step_tokens=64) as server:
        greedy = await ids_of(generate(server.client, temperature=0))
    assert greedy == [greedy[0]] * NUM


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("most", [1, 3, None])
async def test_how_the_stream_is_cut_and_encoded_changes_nothing(
    engine: Engine, most: int | None, zstd: bool
) -> None:
    async with running(engine, max_running=8, max_step_tokens=64) as server:
        whole = generate(server.client, temperature=1, logprobs=True)
        cut = generate(server.client, temperature=1, logprobs=True, max_tokens_per_chunk=most, zstd=zstd)
        assert await ids_of(whole) == await ids_of(cut)
        for one, other in zip(whole.outputs, cut.outputs, strict=True):
            assert (one.text, one.finish_reason) == (other.text, "LENGTH")
            # Not in the same steps, so not rounded in the same way.
            assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=1e-4)


async def test_each_ends_once_and_the_stream_after_all_of_them_with_what_they_cost(engine: Engine) -> None:
    async with running(engine, max_running=8, max_step_tokens=64) as server:
        whole = await ids_of(generate(server.client, temperature=1.5))
        # A token that one output has early, so that they end at different steps.
        stopping = whole[1][2]
        stream = generate(server.client, temperature=1.5, stop_token_ids=[stopping])
        events = [event async for chunk in stream for event in chunk.events]
        num_prompt_tokens = len(await server.client.tokenize(PROMPT))
    assert [event.HasField("stream_end") for event in events] == [False] * (len(events) - 1) + [True]
    for output, ids in zip(stream.outputs, whole, strict=True):
        own = [event for event in events if output_index_of(event) == output.index]
        assert [event.HasField("output_end") for event in own] == [False] * (len(own) - 1) + [True]
        stops = stopping in ids
        assert output.token_ids == (ids[: ids.index(stopping) + 1] if stops else ids)
        assert (output.finish_reason, output.matched) == (("STOP", stopping) if stops else ("LENGTH", None))
    usage = events[-1].stream_end.usage
    assert usage.num_prompt_tokens == num_prompt_tokens
    assert usage.num_completion_tokens == sum(len(output.token_ids) for output in stream.outputs)


# ---------------------------------------------------------------------------------------------------------
# In the middle; `running` sees to it that no block and no stream is left


async def test_a_cancel_ends_all_of_them() -> None:
    gate = Gate()
    async with running(ScriptedEngine(before_step=gate)) as server:
        stream = generate(server.client, max_tokens_per_chunk=1)
        gate.let_through(3)
        await anext(stream)
        cancelling = asyncio.create_task(stream.cancel())
        gate.open_for_good()
        assert await cancelling == "ABORTED"
        await stream.text()
        assert [output.finish_reason for output in stream.outputs] == ["CANCELLED"] * NUM
        assert stream.usage is not None
        assert stream.usage.num_completion_tokens == sum(len(output.token_ids) for output in stream.outputs)


async def test_a_deadline_ends_all_of_them_with_one_status() -> None:
    async with running(ScriptedEngine(step_s=0.02)) as server:
        stream = server.client.generate(
            PROMPT, num_outputs=NUM, max_tokens=500, ignore_eos=True, timeout_s=0.3
        )
        with pytest.raises(CallFailedError) as caught:
            await stream.text()
        assert caught.value.code == "DEADLINE_EXCEEDED"


async def test_where_nothing_is_allowed_that_stream_alone_ends_and_says_why(engine: Engine) -> None:
    async with running(engine, max_running=8, max_step_tokens=64) as server:
        # The only token allowed ends the output, which it may not yet.
        eos = engine.model.vocabulary.eos_token_ids[0]
        bad = generate(server.client, ignore_eos=False, allowed_token_ids=[eos], min_tokens=3, temperature=1)
        good = generate(server.client, temperature=1)
        results = await asyncio.gather(bad.text(), ids_of(good), return_exceptions=True)
        error = results[0]
        assert isinstance(error, CallFailedError)
        assert error.code == "INVALID_ARGUMENT"
        assert error.server_reason == "NOTHING_ALLOWED"
        assert results[1] == await ids_of(generate(server.client, temperature=1))


async def test_what_is_allowed_comes_to_an_end_as_it_may(engine: Engine) -> None:
    eos = engine.model.vocabulary.eos_token_ids[0]
    async with running(engine, max_running=8, max_step_tokens=64) as server:
        stream = generate(server.client, ignore_eos=False, allowed_token_ids=[eos, 50], min_tokens=3)
        for ids in await ids_of(stream):
            assert ids[:3] == [50, 50, 50]
            assert set(ids[3:-1]) <= {50}


@pytest.mark.parametrize("num", [0, 17])
async def test_none_and_too_many_are_refused_with_the_fields_name(num: int) -> None:
    async with running() as server:
        with pytest.raises(CallFailedError, match="num_outputs") as caught:
            await generate(server.client, num_outputs=num).text()
        assert caught.value.code == "INVALID_ARGUMENT"
        assert (await server.client.server_info()).limits.max_outputs == 16
