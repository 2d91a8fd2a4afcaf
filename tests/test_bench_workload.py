from collections import Counter

import pytest

from streamsrv.bench.errors import BenchError
from streamsrv.bench.lengths import LogNormal, Uniform
from streamsrv.bench.prompt_sets import PromptSet
from streamsrv.bench.workload import RequestShape, Workload
from streamsrv.v1 import inference_pb2 as pb
from tests.servers import TestServer, running


async def made(server: TestServer, workload: Workload, count: int, seed: int = 5) -> list[pb.GenerateRequest]:
    make = await workload.requests(server.client, seed)
    return [make(index) for index in range(count)]


async def test_prompts_and_outputs_have_exactly_the_lengths_that_were_drawn() -> None:
    workload = Workload(prompt_lengths=Uniform(3, 40), output_lengths=LogNormal(6, 0.5, 2, 12))
    async with running() as server:
        requests = await made(server, workload, 60)
        for request in requests[:8]:
            stream = server.client.send(request)
            await stream.text()
            assert stream.usage is not None
            assert stream.usage.num_prompt_tokens == len(request.prompt.token_ids.ids)
            assert stream.usage.num_completion_tokens == request.stop.max_tokens
    prompt_lengths = Counter(len(request.prompt.token_ids.ids) for request in requests)
    output_lengths = Counter(request.stop.max_tokens for request in requests)
    assert len(prompt_lengths) > 15
    assert 3 <= min(prompt_lengths) <= max(prompt_lengths) <= 40
    assert len(output_lengths) > 5
    assert 2 <= min(output_lengths) <= max(output_lengths) <= 12


@pytest.mark.parametrize("prompt_set", [None, *PromptSet])
async def test_a_request_is_made_of_the_seed_and_its_number_alone(prompt_set: PromptSet | None) -> None:
    workload = Workload(prompt_lengths=Uniform(3, 40), output_lengths=Uniform(1, 9), prompt_set=prompt_set)
    async with running() as server:
        forwards = await made(server, workload, 12)
        make = await workload.requests(server.client, 5)
        backwards = [make(index) for index in reversed(range(12))]
        others = await made(server, workload, 12, seed=6)
    assert backwards[::-1] == forwards
    assert others != forwards


async def test_without_more_a_workload_has_the_lengths_of_its_shape() -> None:
    async with running() as server:
        requests = await made(server, Workload(RequestShape(num_prompt_tokens=7, max_tokens=9)), 5)
    assert {len(request.prompt.token_ids.ids) for request in requests} == {7}
    assert {request.stop.max_tokens for request in requests} == {9}


def test_a_set_is_refused_for_a_model_without_a_chat_template() -> None:
    model = pb.Model(name="plain", context_length=8192)
    Workload().check(model)
    with pytest.raises(BenchError, match="the model 'plain' has no chat template, and the prompts of a set"):
        Workload(prompt_set=PromptSet.CODE).check(model)


@pytest.mark.parametrize("prompt_set", [PromptSet.CHAT, PromptSet.SHARED, PromptSet.CODE])
async def test_a_server_takes_the_chats_of_a_set(prompt_set: PromptSet) -> None:
    workload = Workload(RequestShape(max_tokens=2), prompt_set=prompt_set)
    async with running() as server:
        for request in await made(server, workload, 6):
            assert await server.client.send(request).text()
