import itertools
from importlib.resources import files
from pathlib import Path

import pytest

from engines.registry import inspect_model
from streamsrv.bench.prompt_sets import PromptSet
from streamsrv.chat import ChatMessage
from streamsrv.tokenizer import Tokenizer

ALL = pytest.mark.parametrize("prompt_set", PromptSet)
NUM = 200


@ALL
def test_a_seed_gives_the_same_chats_again_and_another_one_others(prompt_set: PromptSet) -> None:
    chats = [prompt_set.make(1, i) for i in range(20)]
    assert [prompt_set.make(1, i) for i in range(20)] == chats
    assert [prompt_set.make(2, i) for i in range(20)] != chats


@ALL
def test_a_chat_has_a_system_turn_first_and_a_users_last(prompt_set: PromptSet) -> None:
    for index in range(NUM):
        roles = [role for role, _ in prompt_set.make(1, index)]
        assert roles[0] == "system"
        assert roles[-1] == "user"
        assert all(a != b for a, b in itertools.pairwise(roles))


@pytest.mark.parametrize("prompt_set", [PromptSet.CHAT, PromptSet.DOCUMENT, PromptSet.CODE])
def test_chats_do_not_begin_alike(prompt_set: PromptSet) -> None:
    beginnings = {prompt_set.make(1, index)[0][1][:60] for index in range(NUM)}
    assert len(beginnings) > 0.98 * NUM


def test_the_shared_set_shares_its_system_prompt_and_nothing_behind_it() -> None:
    chats = [PromptSet.SHARED.make(1, index) for index in range(NUM)]
    assert len({chat[0][1] for chat in chats}) == 1
    assert len({chat[1][1] for chat in chats}) > 0.98 * NUM


@ALL
def test_what_a_set_is_made_of_says_where_it_comes_from(prompt_set: PromptSet) -> None:
    text = files("streamsrv.bench").joinpath("sets", f"{prompt_set.value}.toml").read_text(encoding="utf-8")
    header = text[: text.index("\n\n")].replace("\n# ", " ")
    assert "written for this project and is under its licence" in header


@pytest.mark.parametrize(
    ("prompt_set", "least", "most"),
    [
        (PromptSet.CHAT, 50, 250),
        (PromptSet.DOCUMENT, 1_200, 3_500),
        (PromptSet.SHARED, 850, 1_200),
        (PromptSet.CODE, 150, 900),
    ],
)
def test_chats_fit_the_demo_model_and_are_as_long_as_their_kind(
    prompt_set: PromptSet, least: int, most: int, demo_path: Path
) -> None:
    model = inspect_model(demo_path)
    tokenizer = Tokenizer(model.vocabulary)
    lengths = []
    for index in range(60):
        messages = [ChatMessage(role, content) for role, content in prompt_set.make(1, index)]
        lengths.append(
            len(tokenizer.encode(tokenizer.render_chat(messages), add_special=False, parse_special=True))
        )
    assert least <= min(lengths) <= max(lengths) <= most < model.spec.context_length - 1_024
