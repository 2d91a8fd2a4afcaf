"""Models in GGUF files: what is read out of them, and which are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from engines.api import CheckpointError
from engines.checkpoint import open_checkpoint
from engines.gguf_header import SUPPORTED_TYPES
from engines.spec import Activation, Family, SlidingWindow
from tests import tiny
from tests.conftest import TinyPaths

Settings: TypeAlias = dict[str, int | float | str | list[bool] | None]


def refusal(path: Path) -> str:
    """The message that a file is refused with, without the file's name in front."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


def test_the_demo_model_is_described(demo_path: Path) -> None:
    with open_checkpoint(demo_path) as checkpoint:
        info = checkpoint.info
    assert info.spec.family is Family.LLAMA
    assert (info.spec.num_layers, info.spec.hidden_size, info.spec.vocab_size) == (30, 576, 49152)
    assert (info.spec.num_heads, info.spec.num_kv_heads, info.spec.head_dim) == (9, 3, 64)
    assert (info.spec.context_length, info.spec.rope_theta) == (8192, 100000.0)
    assert info.spec.tied_embeddings
    assert info.spec.num_parameters == 134_515_008
    assert info.quantization == "Q4_1"
    assert info.size_bytes == demo_path.stat().st_size
    assert info.revision == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("model", [tiny.LLAMA_UNTIED, tiny.QWEN2], ids=lambda m: m.name)
def test_each_storage_type_gives_back_what_the_package_quantised(
    tmp_path: Path, model: tiny.TinyModel, kind: str
) -> None:
    stored = GGMLQuantizationType[kind]
    weights = tiny.make_weights(model)
    with open_checkpoint(tiny.write_gguf(model, tmp_path / "a.gguf", kind)) as checkpoint:
        assert checkpoint.info.quantization == kind
        for name, hf_name in {
            "embed": "model.embed_tokens.weight",
            "layers.1.q": "model.layers.1.self_attn.q_proj.weight",
            "layers.1.k": "model.layers.1.self_attn.k_proj.weight",
            "layers.0.v": "model.layers.0.self_attn.v_proj.weight",
            "layers.0.down": "model.layers.0.mlp.down_proj.weight",
        }.items():
            # Quantisation works within rows, so that it commutes with the order of rows.
            expected = gguf.dequantize(gguf.quantize(weights[hf_name], stored), stored)
            np.testing.assert_array_equal(checkpoint.tensor(name), expected)


# Where the half-precision scales lie in a block; elsewhere any byte is valid.
K_SCALES = {"Q2_K": (80, 84), "Q3_K": (108, 110), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210)}
WIDE = replace(tiny.LLAMA_TIED, num_layers=1, hidden_size=256, head_dim=64, intermediate_size=256)


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int, seed: int) -> NDArray[np.uint8]:
    random = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    first, last = K_SCALES[kind.name]
    scales = random.uniform(0.001, 0.1, (len(blocks), (last - first) // 2)).astype(np.float16)
    blocks[:, first:last] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", K_SCALES)
def test_k_quants_are_dequantised_as_by_the_package_in_our_order_of_rows(tmp_path: Path, kind: str) -> None:
    stored = GGMLQuantizationType[kind]
    path = tmp_path / "a.gguf"
    blocks = write_quantised(path, stored)
    with open_checkpoint(path) as checkpoint:
        down = gguf.dequantize(blocks["blk.0.ffn_down.weight"], stored)
        np.testing.assert_array_equal(checkpoint.tensor("layers.0.down"), down)
        query = gguf.dequantize(blocks["blk.0.attn_q.weight"], stored).reshape(4, 32, 2, 256)
        halves = np.concatenate([query[:, :, 0], query[:, :, 1]], axis=1).reshape(256, 256)
        np.testing.assert_array_equal(checkpoint.tensor("layers.0.q"), halves)
        np.testing.assert_array_equal(checkpoint.tensor("layers.0.q", slice(33, 100)), halves[33:100])


def write_quantised(path: Path, kind: GGMLQuantizationType) -> dict[str, NDArray[np.uint8]]:
    """Write `WIDE` with random blocks for matrices, and return those."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(WIDE.context_length)
    writer.add_embedding_length(WIDE.hidden_size)
    writer.add_block_count(WIDE.num_layers)
    writer.add_feed_forward_length(WIDE.intermediate_size)
    writer.add_head_count(WIDE.num_heads)
    writer.add_head_count_kv(WIDE.num_kv_heads)
    writer.add_layer_norm_rms_eps(WIDE.rms_eps)
    blocks: dict[str, NDArray[np.uint8]] = {}
    for seed, (name, value) in enumerate(tiny.gguf_weights(WIDE).items()):
        if value.ndim == 1:
            writer.add_tensor(name, value)
        else:
            blocks[name] = random_blocks(kind, value.shape[0], value.shape[1], seed)
            writer.add_tensor(name, blocks[name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return blocks


def test_every_supported_type_is_tested() -> None:
    quantised = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"}
    assert {kind.name for kind in SUPPORTED_TYPES} == quantised | set(K_SCALES)


def test_damaged_scales_are_reported_when_the_tensor_is_read(tmp_path: Path) -> None:
    path = tiny.write_gguf(tiny.QWEN2, tmp_path / "a.gguf", "Q8_0")
    reader = gguf.GGUFReader(path, "r+")
    down = next(t for t in reader.tensors if t.name == "blk.1.ffn_down.weight")
    down.data[40, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    reader.data.flush()
    with open_checkpoint(path) as checkpoint:
        checkpoint.tensor("layers.1.down", slice(0, 40))
        with pytest.raises(
            CheckpointError, match=r"a\.gguf: tensor 'blk\.1\.ffn_down\.weight' holds weights"
        ):
            checkpoint.tensor("layers.1.down")


def test_llama_3_factors_are_read_into_the_spec(tiny_models: dict[str, TinyPaths]) -> None:
    with open_checkpoint(tiny_models[tiny.LLAMA_SCALED.name].gguf) as checkpoint:
        factors = checkpoint.spec.rope_factors
    assert factors is not None
    assert len(factors) == 8
    assert factors[0] == 1
    assert 1 < factors[1] < 8
    assert factors[2:] == (8,) * 6


def test_factors_of_one_are_no_scaling(tmp_path: Path) -> None:
    weights = tiny.gguf_weights(tiny.LLAMA_SCALED)
    weights["rope_freqs.weight"] = np.ones(8, np.float32)
    path = tiny.write_gguf(tiny.LLAMA_SCALED, tmp_path / "a.gguf", weights=weights)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.spec.rope_factors is None


@pytest.mark.parametrize("factors", [np.ones(7), np.zeros(8), -np.ones(8), np.full(8, np.nan)])
def test_impossible_factors_are_refused(tmp_path: Path, factors: NDArray[Any]) -> None:
    weights = tiny.gguf_weights(tiny.LLAMA_SCALED)
    weights["rope_freqs.weight"] = factors.astype(np.float32)
    path = tiny.write_gguf(tiny.LLAMA_SCALED, tmp_path / "a.gguf", weights=weights)
    assert "tensor 'rope_freqs.weight'" in refusal(path)


def test_a_model_without_a_name_is_called_after_its_file(tmp_path: Path) -> None:
    path = tiny.write_gguf(tiny.QWEN2, tmp_path / "my-model.gguf", settings={"general.name": None})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.spec.name == "my-model"


def test_another_architecture_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    path = tiny.write_gguf(tiny.QWEN2, tmp_path / "a.gguf", settings={"general.architecture": "mamba"})
    assert refusal(path) == (
        "architecture 'mamba' is not supported; supported are llama, qwen2, qwen3, gemma3, phi3"
    )


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    path = tiny.write_gguf(tiny.LLAMA_TIED, tmp_path / "a.gguf", settings={"llama.expert_count": 8})
    assert refusal(path) == "is a mixture of experts; only dense models are supported"


def test_one_part_of_a_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tiny.write_gguf(tiny.LLAMA_TIED, tmp_path / "a.gguf", settings={"split.count": 3})
    assert refusal(path) == "is one of 3 parts of a model; join them with llama-gguf-split --merge"


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_another_rope_scaling_is_refused_by_its_name(tmp_path: Path, kind: str) -> None:
    settings: Settings = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    path = tiny.write_gguf(tiny.LLAMA_TIED, tmp_path / "a.gguf", settings=settings)
    assert f"by the {kind!r} method" in refusal(path)


def test_a_scaling_by_one_is_no_scaling(tmp_path: Path) -> None:
    settings: Settings = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}
    open_checkpoint(tiny.write_gguf(tiny.LLAMA_TIED, tmp_path / "a.gguf", settings=settings)).close()


def test_a_sliding_window_that_is_active_is_refused(tmp_path: Path) -> None:
    path = tiny.write_gguf(
        tiny.LLAMA_TIED, tmp_path / "a.gguf", settings={"llama.attention.sliding_window": 64}
    )
    assert "sliding window of 64 tokens" in refusal(path)


def test_a_sliding_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    settings = {"llama.attention.sliding_window": tiny.LLAMA_TIED.context_length}
    open_checkpoint(tiny.write_gguf(tiny.LLAMA_TIED, tmp_path / "a.gguf", settings=settings)).close()


def test_heads_that_are_rotated_in_part_are_refused(tmp_path: Path) -> None:
    settings = {"llama.rope.dimension_count": 8}
    path = tiny.write_gguf(tiny.LLAMA_TIED, tmp_path / "a.gguf", settings=settings)
    assert refusal(path) == "rotates 8 of a head's 16 numbers; only whole heads are supported"


def test_gemma_3_is_described(tiny_models: dict[str, TinyPaths]) -> None:
    with open_checkpoint(tiny_models[tiny.GEMMA3.name].gguf) as checkpoint:
        spec = checkpoint.spec
    assert spec.window == SlidingWindow(9, (0, 2), rope_theta=10000.0)
    assert (spec.rope_theta, spec.rope_factors) == (1e6, (8.0,) * 16)
    assert (spec.qk_norm, spec.post_norms, spec.activation) == (True, True, Activation.GELU_TANH)
    assert (spec.embed_scale, spec.attention_scale) == (8.0, None)


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [(None, (0, 1, 2, 3)), (3, (0, 1, 3)), ([False, True, True, False], (1, 2)), (1, None)],
)
def test_gemmas_layers_with_a_window_are_each_but_the_sixth_or_as_the_file_says(
    tmp_path: Path, pattern: int | list[bool] | None, layers: tuple[int, ...] | None
) -> None:
    settings: Settings = {"gemma3.attention.sliding_window_pattern": pattern}
    path = tiny.write_gguf(tiny.GEMMA3, tmp_path / "a.gguf", settings=settings)
    with open_checkpoint(path) as checkpoint:
        window = checkpoint.spec.window
    assert (None if window is None else window.layers) == layers


def test_attention_of_gemmas_27b_size_has_a_scale_of_its_own(tmp_path: Path) -> None:
    model = replace(tiny.GEMMA3, num_layers=62, hidden_size=16, intermediate_size=16, num_heads=1, head_dim=8)
    with open_checkpoint(tiny.write_gguf(model, tmp_path / "a.gguf")) as checkpoint:
        assert checkpoint.spec.attention_scale == 0.25


def test_phi_3_is_read_up_to_the_length_before_it_was_stretched(
    tiny_models: dict[str, TinyPaths], caplog: pytest.LogCaptureFixture
) -> None:
    with open_checkpoint(tiny_models[tiny.PHI3.name].gguf) as checkpoint:
        spec = checkpoint.spec
    assert (spec.context_length, spec.window) == (256, SlidingWindow(12, (0, 1)))
    assert spec.rope_factors == pytest.approx(tiny.SHORT_FACTORS)
    assert spec.rope_magnitude == pytest.approx((1 + np.log(4) / np.log(256)) ** 0.5)
    assert "its LongRoPE is supported up to its original context" in caplog.text


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (tiny.GEMMA3, {"gemma3.final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        (tiny.GEMMA3, {"gemma3.attention.sliding_window": None}, "has no gemma3.attention.sliding_window"),
        (tiny.GEMMA3, {"gemma3.rope.freq_base": None}, "has no gemma3.rope.freq_base"),
        (tiny.GEMMA3, {"gemma3.rope.scaling.type": "yarn"}, "supported are none and linear"),
        (
            tiny.GEMMA3,
            {"gemma3.attention.sliding_window_pattern": [True] * 5},
            "says of 5 layers whether they attend to a window, but has 4",
        ),
        (
            tiny.PHI3,
            {"phi3.rope.scaling.type": "yarn"},
            "by the 'yarn' method; supported are none and longrope",
        ),
        (tiny.PHI3, {"phi3.rope.dimension_count": 12}, "rotates 12 of a head's 16 numbers"),
    ],
)
def test_what_is_not_supported_of_gemma_3_and_phi_3_is_refused_by_name(
    tmp_path: Path, model: tiny.TinyModel, settings: Settings, message: str
) -> None:
    assert message in refusal(tiny.write_gguf(model, tmp_path / "a.gguf", settings=settings))


def test_heads_that_cannot_share_are_refused(tmp_path: Path) -> None:
    settings = {"llama.attention.head_count_kv": 3}
    path = tiny.write_gguf(tiny.LLAMA_TIED, tmp_path / "a.gguf", settings=settings)
    assert "4 attention heads cannot share 3 key/value heads" in refusal(path)


@pytest.mark.parametrize(
    "key", ["llama.block_count", "llama.context_length", "llama.attention.layer_norm_rms_epsilon"]
)
def test_a_missing_setting_is_named(tmp_path: Path, key: str) -> None:
    path = tiny.write_gguf(tiny.LLAMA_TIED, tmp_path / "a.gguf", settings={key: None})
    assert refusal(path) == f"has no {key}, which the model needs"


@pytest.mark.parametrize("value", [0, 10_001, 2**31 - 1, 2**31, "many"])
def test_an_impossible_setting_is_named_with_what_is_allowed(tmp_path: Path, value: int | str) -> None:
    path = tiny.write_gguf(tiny.LLAMA_TIED, tmp_path / "a.gguf", settings={"llama.block_count": value})
    assert refusal(path) == f"llama.block_count is {value!r}; it must be a whole number from 1 to 10000"


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    weights = tiny.gguf_weights(tiny.LLAMA_TIED)
    del weights["blk.1.ffn_up.weight"]
    path = tiny.write_gguf(tiny.LLAMA_TIED, tmp_path / "a.gguf", weights=weights)
    assert "tensor 'blk.1.ffn_up.weight' is missing" in refusal(path)


def test_a_file_without_embeddings_is_refused(tmp_path: Path) -> None:
    weights = tiny.gguf_weights(tiny.LLAMA_TIED)
    del weights["token_embd.weight"]
    path = tiny.write_gguf(tiny.LLAMA_TIED, tmp_path / "a.gguf", weights=weights)
    assert "tensor 'token_embd.weight' is missing" in refusal(path)


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    weights = tiny.gguf_weights(tiny.LLAMA_TIED)
    weights["blk.0.attn_k.weight"] = weights["blk.0.attn_k.weight"][:16]
    path = tiny.write_gguf(tiny.LLAMA_TIED, tmp_path / "a.gguf", weights=weights)
    assert refusal(path) == (
        "tensor 'blk.0.attn_k.weight' has shape [16, 64], but the model's settings make it [32, 64]"
    )


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.bias", "blk.2.ffn_gate_inp.weight", "blk.1.attn_q_norm.weight"]
)
def test_a_tensor_that_the_family_does_not_have_is_refused(tmp_path: Path, name: str) -> None:
    weights = tiny.gguf_weights(tiny.LLAMA_TIED) | {name: np.zeros(64, np.float32)}
    path = tiny.write_gguf(tiny.LLAMA_TIED, tmp_path / "a.gguf", weights=weights)
    assert refusal(path) == (
        f"tensor {name!r} is not part of a llama model as supported here (dense, without biases)"
    )


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    weights = tiny.gguf_weights(tiny.LLAMA_TIED)
    weights["token_embd.weight"] = weights["token_embd.weight"][:300]
    path = tiny.write_gguf(tiny.LLAMA_TIED, tmp_path / "a.gguf", weights=weights)
    assert refusal(path) == "names 320 tokens but has embeddings for 300"


def test_an_unusable_tokenizer_is_reported_with_the_file_when_it_is_asked_for(tmp_path: Path) -> None:
    path = tiny.write_gguf(tiny.LLAMA_TIED, tmp_path / "a.gguf", settings={"tokenizer.ggml.model": "bert"})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensor_shape("embed") == (320, 64)
        with pytest.raises(CheckpointError, match=r"a\.gguf: .*'bert'"):
            _ = checkpoint.info
