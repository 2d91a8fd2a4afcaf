"""The main job on the real model: the demo checkpoint on each CPU engine, over gRPC."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from streamsrv.chunks import ChunkDecoder
from streamsrv.client import Client, make_request
from streamsrv.config import Settings
from streamsrv.opening import open_model
from streamsrv.server import serving
from streamsrv.v1 import inference_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time, in a village by the sea,"]


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["openvino", "onnxruntime"])
async def client(
    request: pytest.FixtureRequest, demo_path: object, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Client]:
    pytest.importorskip(request.param)
    settings = Settings(
        engine=request.param,
        model=str(demo_path),
        listen="127.0.0.1:0",
        cache_dir=tmp_path_factory.mktemp("cache"),
        kv_cache_gib=0.25,
        max_context=256,
    )
    engine = await asyncio.to_thread(open_model, settings)
    async with serving(settings, engine) as server, Client(f"127.0.0.1:{server.port}") as client:
        yield client
        await server.pool.wait_idle()
        server.pool.check_integrity()
    engine.close()


async def test_the_capital_of_france_is_paris(client: Client) -> None:
    text = await client.generate(PROMPTS[0], temperature=0, max_tokens=4).text()
    assert text.startswith(" Paris")


async def test_a_chat_is_answered_sensibly_and_ends_by_itself(client: Client) -> None:
    # Not of France: the float32 model's two best beginnings, of which one ends in Paris, are 0.08 apart.
    stream = client.generate([("user", "What is 2+2?")], temperature=0, max_tokens=64)
    assert "4" in await stream.text()
    assert stream.finish_reason == "STOP"


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("most", [1, 2, 4, 8])
async def test_the_joined_text_is_the_whole_decoded_at_once(client: Client, zstd: bool, most: int) -> None:
    stream = client.generate(
        "Write about 東京 and emoji 👩‍🔬:", seed=most, max_tokens=48, ignore_eos=True, zstd=zstd,
        max_tokens_per_chunk=most, temperature=2.0,
    )  # fmt: skip
    text, ids = "", list[int]()
    async for chunk in stream:
        text += chunk.text
        ids += chunk.token_ids
        assert chunk.num_tokens <= most
    assert len(ids) == 48
    assert text == await client.detokenize(ids, skip_special_tokens=True)


async def test_a_generation_alone_equals_the_same_in_company(client: Client) -> None:
    """Exactly equal here, where a batch's rows do not change a row's arithmetic; seeds make draws equal."""
    alone = [await client.generate(p, temperature=0, max_tokens=24).text() for p in PROMPTS]
    together = await asyncio.gather(
        *(client.generate(p, temperature=0, max_tokens=24).text() for p in PROMPTS * 3)
    )
    for i, text in enumerate(together):
        # Ragged batches may round differently, so only the beginning must agree.
        assert text[:8] == alone[i % 3][:8]


async def test_usage_counts_the_ids(client: Client) -> None:
    stream = client.generate(PROMPTS[1], max_tokens=9, seed=1, ignore_eos=True)
    ids = [i async for chunk in stream for i in chunk.token_ids]
    assert stream.usage == pb.Usage(
        num_prompt_tokens=len(await client.tokenize(PROMPTS[1])), num_completion_tokens=len(ids)
    )


async def test_the_generated_stub_alone_is_enough(client: Client) -> None:
    """What a client in another language has: messages and the decoder's few lines."""
    decoder, text = ChunkDecoder(), ""
    async for message in client.stub.Generate(make_request(PROMPTS[0], temperature=0, max_tokens=8)):
        assert message.stream_id
        for event in decoder.decode(message).events:
            text += event.tokens.text + event.output_end.text
    assert text.startswith(" Paris")
