import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamsrv.bench.prompts import PromptMaker, prompt_maker, shipped_text
from tests.servers import running

TEXT_IDS = [7, 3, 9, 3, 7, 1, 4, 1, 5]


@given(st.integers(1, 60), st.integers(0, 2**32), st.integers(0, 1000))
def test_a_prompt_has_exactly_the_length_and_tokens_of_the_text(length: int, seed: int, index: int) -> None:
    prompt = PromptMaker(TEXT_IDS, length, seed).make(index)
    assert len(prompt) == length
    assert set(prompt) <= set(TEXT_IDS)


@given(st.integers(0, 2**32), st.integers(0, 1000))
def test_no_two_prompts_begin_with_the_same_two_tokens(seed: int, first: int) -> None:
    maker = PromptMaker(TEXT_IDS, 16, seed)
    assert maker.num_distinct == 36
    prompts = [maker.make(first + i) for i in range(maker.num_distinct)]
    assert len({tuple(prompt[:2]) for prompt in prompts}) == maker.num_distinct


def test_a_seed_gives_the_same_prompts_again_and_another_one_others() -> None:
    one, same, other = (PromptMaker(TEXT_IDS, 40, seed) for seed in (1, 1, 2))
    prompts = [one.make(i) for i in range(5)]
    assert [same.make(i) for i in range(5)] == prompts
    assert [other.make(i) for i in range(5)] != prompts


@pytest.mark.parametrize("length", [1, 200, 8000])
async def test_the_server_counts_as_many_tokens_as_were_asked_for(length: int) -> None:
    async with running(max_context=8192) as server:
        maker = await prompt_maker(server.client, length, seed=3)
        stream = server.client.generate(maker.make(0), max_tokens=1)
        assert (await stream.start()).num_prompt_tokens == length
        await stream.text()


def test_the_shipped_text_is_prose_of_some_length() -> None:
    assert len(shipped_text().split()) > 500
