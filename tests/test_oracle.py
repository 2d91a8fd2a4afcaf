"""The oracle itself: against Hugging Face's logits, and its own incremental form."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from engines.checkpoint import open_checkpoint
from engines.tensors import tensor_shapes
from tests import tiny
from tests.conftest import TinyPaths
from tests.golden.logits import GOLDEN_IDS, GOLDEN_LOGITS
from tests.oracle import Floats, OracleDecoder, first_real_difference

# Measured: at most 2.7e-5, on logits of up to 18.
MAX_DIFFERENCE = 1e-4

names = pytest.mark.parametrize("name", [model.name for model in tiny.EVERY_MODEL])


def oracle_logits(path: Path, ids: Sequence[int]) -> Floats:
    with open_checkpoint(path) as checkpoint:
        return OracleDecoder(checkpoint.tensor, checkpoint.spec).logits(ids)


@names
def test_the_oracle_gives_the_logits_of_transformers_from_a_folder(
    name: str, tiny_models: dict[str, TinyPaths]
) -> None:
    golden = np.load(GOLDEN_LOGITS)[name]
    logits = oracle_logits(tiny_models[name].folder, GOLDEN_IDS)
    np.testing.assert_allclose(logits, golden, rtol=0, atol=MAX_DIFFERENCE)


@names
def test_the_oracle_gives_the_logits_of_transformers_from_a_gguf_file(
    name: str, tiny_models: dict[str, TinyPaths]
) -> None:
    golden = np.load(GOLDEN_LOGITS)[name]
    logits = oracle_logits(tiny_models[name].gguf, GOLDEN_IDS)
    np.testing.assert_allclose(logits, golden, rtol=0, atol=MAX_DIFFERENCE)


def test_the_oracle_gives_the_logits_of_transformers_where_attention_has_a_scale_of_its_own(
    tmp_path: Path,
) -> None:
    model = tiny.GEMMA3_SCALED
    logits = oracle_logits(tiny.write_hf(model, tmp_path), GOLDEN_IDS)
    np.testing.assert_allclose(logits, np.load(GOLDEN_LOGITS)[model.name], rtol=0, atol=MAX_DIFFERENCE)


@pytest.mark.parametrize("model", tiny.WINDOWED_MODELS, ids=lambda model: model.name)
def test_the_golden_logits_depend_on_every_setting_of_a_window(
    model: tiny.TinyModel, tiny_models: dict[str, TinyPaths]
) -> None:
    golden = np.load(GOLDEN_LOGITS)[model.name]
    with open_checkpoint(tiny_models[model.name].folder) as checkpoint:
        spec, window = checkpoint.spec, checkpoint.spec.window
        assert window is not None
        for wrong in (
            replace(spec, window=replace(window, size=window.size + 1)),
            replace(spec, window=replace(window, layers=window.layers[1:])),
            replace(spec, window=replace(window, rope_theta=20000.0)),
            replace(spec, rope_factors=None),
            replace(spec, rope_magnitude=1.1),
        ):
            logits = OracleDecoder(checkpoint.tensor, wrong).logits(GOLDEN_IDS)
            assert np.abs(logits - golden).max() > 100 * MAX_DIFFERENCE


@names
def test_the_golden_logits_depend_on_every_tensor(name: str, tiny_models: dict[str, TinyPaths]) -> None:
    # Or the comparison with them would not see a tensor that is left out or misplaced.
    golden = np.load(GOLDEN_LOGITS)[name]
    with open_checkpoint(tiny_models[name].folder) as checkpoint:
        for wrong in [n for n, _ in tensor_shapes(checkpoint.spec)]:

            def changed(asked: str, wrong: str = wrong) -> Floats:
                value = checkpoint.tensor(asked)
                return np.roll(value, 1, axis=0) if asked == wrong else value

            logits = OracleDecoder(changed, checkpoint.spec).logits(GOLDEN_IDS)
            assert np.abs(logits - golden).max() > 100 * MAX_DIFFERENCE, wrong


def test_llama_3_scaling_changes_the_golden_logits(tiny_models: dict[str, TinyPaths]) -> None:
    paths = tiny_models[tiny.LLAMA_SCALED.name]
    with open_checkpoint(paths.folder) as checkpoint:
        plain = replace(checkpoint.spec, rope_scaling=None)
        logits = OracleDecoder(checkpoint.tensor, plain).logits(GOLDEN_IDS)
    assert np.abs(logits - np.load(GOLDEN_LOGITS)[paths.model.name]).max() > 0.1


@names
def test_pieces_of_any_size_give_the_logits_of_the_whole(
    name: str, tiny_models: dict[str, TinyPaths]
) -> None:
    with open_checkpoint(tiny_models[name].folder) as checkpoint:
        decoder = OracleDecoder(checkpoint.tensor, checkpoint.spec)
        whole = decoder.logits(GOLDEN_IDS)
        for size in (1, 2, 7, 39):
            first = decoder.logits(GOLDEN_IDS[:size])
            rest = [decoder.extend(GOLDEN_IDS[at : at + size]) for at in range(size, len(GOLDEN_IDS), size)]
            np.testing.assert_allclose(np.concatenate([first, *rest]), whole, rtol=0, atol=MAX_DIFFERENCE)


def test_the_demo_model_names_the_capital_of_france(demo_path: Path) -> None:
    with open_checkpoint(demo_path) as checkpoint:
        tokenizer = Tokenizer.from_str(checkpoint.vocabulary.tokenizer_json)
        decoder = OracleDecoder(checkpoint.tensor, checkpoint.spec)
        continuation = decoder.greedy(tokenizer.encode("The capital of France is").ids, 2)
    assert tokenizer.decode(continuation.ids).startswith(" Paris")


LOGITS = np.array([[0.0, 3.0, 1.0], [2.0, 0.0, 2.0 - 5e-5], [5.0, 0.0, 0.0]], np.float32)


def test_equal_continuations_have_no_difference() -> None:
    comparison = first_real_difference(LOGITS, [1, 0, 0])
    assert (comparison.num_equal, comparison.different_at, comparison.tied_at) == (3, None, None)


def test_another_token_is_a_real_difference() -> None:
    comparison = first_real_difference(LOGITS, [2, 0, 0])
    assert (comparison.num_equal, comparison.different_at, comparison.tied_at) == (0, 0, None)


def test_another_token_of_a_tie_ends_the_comparison() -> None:
    comparison = first_real_difference(LOGITS, [1, 2, 1])
    assert (comparison.num_equal, comparison.different_at, comparison.tied_at) == (1, None, 1)


def test_a_token_outside_the_tie_is_a_real_difference() -> None:
    comparison = first_real_difference(LOGITS, [1, 1, 0])
    assert (comparison.num_equal, comparison.different_at, comparison.tied_at) == (1, 1, None)
