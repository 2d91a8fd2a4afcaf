"""Log probabilities over gRPC: those of a plain log-softmax over the oracle's logits, however they travel."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.api import Engine
from engines.checkpoint import open_checkpoint
from engines.registry import open_engine
from engines.trt_library import TENSORRT
from streamsrv.client import Client
from streamsrv.client.output import Output
from tests import tiny
from tests.conftest import TinyPaths
from tests.oracle import OracleDecoder
from tests.servers import running
from tests.trt_rig import in_cache, make_rig

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOP = 5
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["openvino", "onnxruntime", TENSORRT])
def engine(
    request: pytest.FixtureRequest,
    tiny_models: dict[str, TinyPaths],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    """Compute in float32; the last gives candidates instead of full rows."""
    path, options = tiny_models[tiny.LLAMA_TIED.name].gguf, in_cache(tmp_path_factory.mktemp("cache"))
    if request.param == TENSORRT:
        engine: Engine = make_rig().open(path, options)
    else:
        pytest.importorskip(request.param)
        engine = open_engine(request.param, path, options)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def decoder(tiny_models: dict[str, TinyPaths]) -> Iterator[OracleDecoder]:
    with open_checkpoint(tiny_models[tiny.LLAMA_TIED.name].gguf) as checkpoint:
        yield OracleDecoder(checkpoint.tensor, checkpoint.info.spec)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """By definition, in float64, of each row."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


async def first_output(client: Client, prompt: str, **options: Any) -> Output:
    stream = client.generate(prompt, **{"max_tokens": 24, "ignore_eos": True, "seed": 7, **options})
    await stream.text()
    return stream.outputs[0]


REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.3},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 1, "logit_bias": {7: 30.0}, "frequency_penalty": 8, "banned_token_ids": [1, 2, 3]},
    {"temperature": 1, "allowed_token_ids": list(range(40, 90)), "min_tokens": 10},
]


async def test_each_tokens_is_its_own_and_that_of_the_model_whatever_was_asked_for(
    engine: Engine, decoder: OracleDecoder
) -> None:
    prompt = "The capital of France is"
    async with running(engine, max_running=8, max_step_tokens=64) as server:
        prompt_ids = await server.client.tokenize(prompt)
        outputs = await asyncio.gather(
            *(
                first_output(server.client, prompt, num_top_logprobs=NUM_TOP, logprobs=True, **options)
                for options in REQUESTS
            )
        )
        texts = {i: await server.client.detokenize([i]) for i in {t for o in outputs for t in o.token_ids}}
    for output in outputs:
        rows = decoder.logits([*prompt_ids, *output.token_ids])[len(prompt_ids) - 1 : -1]
        expected, places = log_softmax(rows), np.arange(24)
        np.testing.assert_allclose(
            output.logprobs, expected[places, output.token_ids], rtol=0, atol=TOLERANCE
        )
        assert len(output.top_logprobs) == 24
        for row, top in zip(expected, output.top_logprobs, strict=True):
            best = np.sort(row)[::-1][:NUM_TOP]
            np.testing.assert_allclose(top.logprobs, best, rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(row[list(top.token_ids)], top.logprobs, rtol=0, atol=TOLERANCE)
            assert len(set(top.token_ids)) == NUM_TOP
            for token_id, text in zip(top.token_ids, top.texts, strict=True):
                if token_id in texts and "\ufffd" not in texts[token_id]:
                    assert text.decode() == texts[token_id]


async def test_how_they_are_cut_and_encoded_changes_nothing(engine: Engine) -> None:
    async with running(engine, max_running=8, max_step_tokens=64) as server:
        outputs = [
            await first_output(
                server.client,
                "once upon a time",
                temperature=0,
                num_top_logprobs=NUM_TOP,
                zstd=zstd,
                max_tokens_per_chunk=most,
            )
            for zstd in (False, True)
            for most in (1, 3, None)
        ]
    told = [(o.token_ids, o.logprobs, o.top_logprobs, o.text) for o in outputs]
    assert all(each == told[0] for each in told)
    assert len(outputs[0].logprobs) == len(outputs[0].top_logprobs) == 24


async def test_they_change_no_token_and_none_come_unasked(engine: Engine) -> None:
    async with running(engine, max_running=8, max_step_tokens=64) as server:
        for options in REQUESTS:
            without = await first_output(server.client, "x y z", **options)
            told = await first_output(server.client, "x y z", logprobs=True, **options)
            assert without.token_ids == told.token_ids
            assert (without.logprobs, without.top_logprobs, told.top_logprobs) == ([], [], [])
            assert len(told.logprobs) == 24
