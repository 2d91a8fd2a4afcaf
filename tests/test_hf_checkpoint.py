"""Models in Hugging Face folders: what is read out of them, and which are refused."""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from engines.api import CheckpointError
from engines.checkpoint import open_checkpoint
from engines.spec import Activation, Family, ModelSpec, RopeScaling, SlidingWindow
from tests import tiny
from tests.conftest import TinyPaths

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def refusal(folder: Path, file: str = "") -> str:
    """The message that a folder is refused with, without the culprit's name in front."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    culprit = folder / file
    assert str(caught.value).startswith(f"{culprit}: ")
    return str(caught.value).removeprefix(f"{culprit}: ")


def with_config(
    folder: Path, settings: Mapping[str, Any] | None = None, model: tiny.TinyModel = tiny.LLAMA_UNTIED
) -> Path:
    """Write a model whose config.json has other settings; None leaves one out."""
    tiny.write_hf(model, folder)
    config = tiny.config(model) | dict(settings or {})
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def spec_of(folder: Path) -> ModelSpec:
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.spec


def with_weights(
    folder: Path,
    changes: Mapping[str, NDArray[Any] | None],
    model: tiny.TinyModel = tiny.LLAMA_UNTIED,
) -> Path:
    """Write a model with some tensors added, replaced or (None) left out."""
    tiny.write_hf(model, folder)
    weights = load_file(folder / WEIGHTS) | dict(changes)
    save_file({k: v for k, v in weights.items() if v is not None}, folder / WEIGHTS)
    return folder


def test_a_folder_is_described(tiny_models: dict[str, TinyPaths]) -> None:
    paths = tiny_models[tiny.MISTRAL.name]
    with open_checkpoint(paths.folder) as checkpoint:
        info = checkpoint.info
    weights = paths.folder / WEIGHTS
    assert info.path == str(paths.folder)
    assert info.name == paths.folder.name
    assert info.quantization == "F32"
    assert info.size_bytes == weights.stat().st_size
    assert info.revision == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert info.vocabulary.eos_token_ids == (0, 2)
    assert info.spec == ModelSpec(
        family=Family.LLAMA,
        name=paths.folder.name,
        vocab_size=320,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=96,
        context_length=256,
        rms_eps=1e-5,
        rope_theta=1e6,
        rope_scaling=None,
        tied_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
    )


def test_llama_3_scaling_is_read_in_both_forms(tmp_path: Path) -> None:
    expected = RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_context=32)
    old, new = {"rope_theta": 5e5}, {"rope_theta": None}
    forms: tuple[dict[str, Any], ...] = (
        {**old, "rope_scaling": {"rope_type": "llama3", **tiny.LLAMA3_SCALING}},
        {**old, "rope_scaling": {"type": "llama3", **tiny.LLAMA3_SCALING}},
        {**new, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **tiny.LLAMA3_SCALING}},
    )
    for number, settings in enumerate(forms):
        spec = spec_of(with_config(tmp_path / str(number), settings))
        assert (spec.rope_scaling, spec.rope_theta) == (expected, 5e5)


def test_absent_settings_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    absent = dict.fromkeys(("rope_theta", "rms_norm_eps", "hidden_act", "tie_word_embeddings"))
    spec = spec_of(with_config(tmp_path, absent))
    assert (spec.rope_theta, spec.rms_eps, spec.head_dim, spec.tied_embeddings) == (10000, 1e-6, 16, False)


def test_embeddings_are_tied_where_nothing_is_said_and_there_is_no_output_projection(tmp_path: Path) -> None:
    assert spec_of(with_config(tmp_path, {"tie_word_embeddings": None}, tiny.LLAMA_TIED)).tied_embeddings


def test_a_copy_of_the_tied_table_is_passed_over(tmp_path: Path) -> None:
    folder = with_weights(tmp_path, {"lm_head.weight": np.zeros((320, 64), np.float32)}, tiny.LLAMA_TIED)
    with open_checkpoint(folder) as checkpoint:
        assert not checkpoint.has("lm_head")


def test_rotary_frequencies_in_old_files_are_passed_over(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    open_checkpoint(with_weights(tmp_path, {name: np.ones(8, np.float32)})).close()


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision_is_read_exactly(tmp_path: Path, kind: str) -> None:
    tiny.write_hf(tiny.QWEN3, tmp_path, kind)
    stored = load_file(tmp_path / WEIGHTS)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.info.quantization == kind
        expected = stored["model.layers.1.self_attn.q_proj.weight"].astype(np.float32)
        np.testing.assert_array_equal(checkpoint.tensor("layers.1.q"), expected)
        np.testing.assert_array_equal(checkpoint.tensor("layers.1.q", slice(5, 9)), expected[5:9])


def test_shards_hold_the_same_weights_as_one_file(tmp_path: Path) -> None:
    one = tiny.write_hf(tiny.QWEN2, tmp_path / "one")
    three = tiny.write_hf(tiny.QWEN2, tmp_path / "three", num_shards=3)
    with open_checkpoint(one) as a, open_checkpoint(three) as b:
        for name in ("embed", "layers.0.q_bias", "layers.1.down", "final_norm"):
            np.testing.assert_array_equal(a.tensor(name), b.tensor(name))
        content = b"".join(path.read_bytes() for path in sorted(three.glob("*.safetensors")))
        assert b.revision == hashlib.sha256(content).hexdigest()
        assert b.info.size_bytes == len(content)


def test_a_model_in_the_hub_s_cache_is_called_after_its_repository(tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "0123abc"
    assert spec_of(tiny.write_hf(tiny.QWEN3, folder)).name == "Qwen3-0.6B"


def test_a_folder_without_config_is_refused_with_what_to_do(tmp_path: Path) -> None:
    assert "holds no config.json" in refusal(tmp_path)
    assert "give that file's path" in refusal(tmp_path)


def test_another_architecture_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neox"}')
    assert refusal(tmp_path, "config.json") == (
        "architecture 'gpt_neox' is not supported; supported are llama, mistral, qwen2, qwen3, "
        "gemma3_text, gemma3, phi3"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_bias": True}, "attention_bias is not supported for llama"),
        ({"mlp_bias": True}, "mlp_bias is not supported for llama"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported; supported is silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "the weights are quantised"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "by the 'linear' method"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "supported are default and llama3"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "by the 'dynamic' method"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "has no low_freq_factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", **tiny.LLAMA3_SCALING, "low_freq_factor": 4.0}},
            "must be below high_freq_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "rotates a part of each head only"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"num_attention_heads": 3}, "3 attention heads cannot share 2 key/value heads"),
        ({"head_dim": 15}, "heads of 15 numbers cannot be rotated"),
        ({"hidden_size": None}, "has no hidden_size, which the model needs"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'; it must be a whole number"),
        (
            {"num_hidden_layers": 2**31 - 1},
            "num_hidden_layers is 2147483647; it must be a whole number from 1",
        ),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; it must be a whole number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a positive number"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; it must be a positive number"),
        ({"rope_theta": 10**400}, "it must be a positive number"),
        ({"rope_scaling": 2}, "rope_scaling is 2; it must be a group of settings"),
        ({"layer_types": "full"}, "layer_types is 'full'; it must be a list of texts"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"model_type": ["llama"]}, "model_type is ['llama']; it must be a text"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    assert message in refusal(with_config(tmp_path, settings), "config.json")


def test_a_sliding_window_that_is_active_is_refused(tmp_path: Path) -> None:
    folder = with_config(tmp_path / "mistral", {"sliding_window": 128}, tiny.MISTRAL)
    assert "sliding window of 128 tokens" in refusal(folder, "config.json")
    folder = with_config(tmp_path / "qwen", {"sliding_window": 128, "use_sliding_window": True}, tiny.QWEN2)
    assert "sliding window of 128 tokens" in refusal(folder, "config.json")


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (tiny.MISTRAL, {"sliding_window": 256}),
        (tiny.QWEN2, {"sliding_window": 128, "use_sliding_window": False}),
        (tiny.QWEN3, {"sliding_window": 128}),
        (
            tiny.QWEN2,
            {"sliding_window": 128, "use_sliding_window": True, "layer_types": ["full_attention"] * 2},
        ),
    ],
)
def test_a_sliding_window_that_is_never_active_is_no_window(
    tmp_path: Path, model: tiny.TinyModel, settings: dict[str, Any]
) -> None:
    spec_of(with_config(tmp_path, settings, model))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"hidden_size": ' + b"9" * 5000 + b"}"]
)
def test_a_config_that_is_no_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert refusal(tmp_path, "config.json").startswith("is not valid JSON: ")


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    assert refusal(tmp_path, "config.json") == "holds a JSON list; it must be an object"


def test_a_config_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    assert refusal(tmp_path, "config.json") == "cannot be read: Is a directory"


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with_config(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "pytorch_model.bin")
    assert refusal(tmp_path) == f"holds neither {WEIGHTS} nor {INDEX}; only safetensors are read"


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, -1])
def test_a_file_cut_short_is_refused_by_name(tmp_path: Path, keep: float) -> None:
    path = with_config(tmp_path) / WEIGHTS
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if 0 < keep < 1 else int(keep)])
    assert refusal(tmp_path, WEIGHTS).startswith("is cut short, or not a safetensors file")


def test_weights_that_are_a_folder_are_refused(tmp_path: Path) -> None:
    path = with_config(tmp_path) / WEIGHTS
    path.unlink()
    path.mkdir()
    assert refusal(tmp_path, WEIGHTS).startswith("cannot be read: ")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny.write_hf(tiny.QWEN3, tmp_path, num_shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert refusal(tmp_path, "model-00002-of-00002.safetensors").startswith("is missing;")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "names '../secret.safetensors'"),
        ('{"weight_map": {"a": 3}}', "names 3"),
        ('{"weight_map": {"a": []}}', "names []"),
        ('{"weight_map": {"a": ""}}', "names ''"),
        ('{"weight_map": {"a": ".."}}', "names '..'"),
        ('{"weight_map": {"a": "config.json"}}', "names 'config.json'"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, index: str, message: str) -> None:
    tiny.write_hf(tiny.QWEN3, tmp_path, num_shards=2)
    (tmp_path / INDEX).write_text(index)
    assert refusal(tmp_path, INDEX).startswith(message)


@pytest.mark.parametrize("name", ["a\\u0000.safetensors", "\\ud800.safetensors"])
def test_an_impossible_file_name_in_the_index_is_refused(tmp_path: Path, name: str) -> None:
    tiny.write_hf(tiny.QWEN3, tmp_path, num_shards=2)
    (tmp_path / INDEX).write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
    with pytest.raises(CheckpointError, match=r"is missing|cannot be read"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    tiny.write_hf(tiny.QWEN3, tmp_path, num_shards=2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    assert "is in another file of the model too" in refusal(tmp_path, second.name)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = with_weights(tmp_path, {"model.layers.1.mlp.up_proj.weight": None})
    assert "tensor 'model.layers.1.mlp.up_proj.weight' is missing" in refusal(folder)


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    folder = with_weights(tmp_path, {"model.norm.weight": np.ones(32, np.float32)})
    assert refusal(folder) == (
        "tensor 'model.norm.weight' has shape [32], but the model's settings make it [64]"
    )


def test_a_bias_that_the_family_does_not_have_is_refused(tmp_path: Path) -> None:
    folder = with_weights(
        tmp_path, {"model.layers.0.self_attn.o_proj.bias": np.ones(64, np.float32)}, tiny.QWEN2
    )
    assert refusal(folder) == (
        "tensor 'model.layers.0.self_attn.o_proj.bias' is not part of a qwen2 model as supported here "
        "(dense, with biases on Q, K and V alone)"
    )


def test_an_unsupported_storage_type_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    folder = with_weights(tmp_path, {"model.norm.weight": np.ones(64, np.int8)})
    assert refusal(folder, WEIGHTS) == (
        "tensor 'model.norm.weight' is stored as I8; supported are F32, F16, BF16"
    )


def test_weights_that_are_not_finite_are_reported_when_read(tmp_path: Path) -> None:
    folder = with_weights(tmp_path, {"model.norm.weight": np.full(64, np.inf, np.float32)})
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(CheckpointError, match=r"'model\.norm\.weight'"),
    ):
        checkpoint.tensor("final_norm")


def test_a_header_of_absurd_length_is_refused(tmp_path: Path) -> None:
    path = with_config(tmp_path) / WEIGHTS
    path.write_bytes(struct.pack("<Q", 2**62) + bytes(1000))
    assert "header too large" in refusal(tmp_path, WEIGHTS)


# Gemma 3 and Phi-3


def test_gemma_3_is_described(tiny_models: dict[str, TinyPaths]) -> None:
    spec = spec_of(tiny_models[tiny.GEMMA3.name].folder)
    assert spec.family is Family.GEMMA3
    assert spec.window == SlidingWindow(9, (0, 2), rope_theta=10000.0)
    assert (spec.rope_theta, spec.rope_factors, spec.rope_scaling) == (1e6, (8.0,) * 16, None)
    assert (spec.qk_norm, spec.post_norms, spec.activation) == (True, True, Activation.GELU_TANH)
    assert (spec.embed_scale, spec.attention_scale) == (8.0, None)
    assert spec.tied_embeddings


def test_gemmas_settings_are_read_in_both_forms(tmp_path: Path) -> None:
    old = {
        "rope_theta": 2e6,
        "rope_local_base_freq": 3e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
    }
    new = dict.fromkeys(old) | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
        },
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    specs = [
        spec_of(with_config(tmp_path / str(number) / "model", settings, tiny.GEMMA3))
        for number, settings in enumerate((old, new))
    ]
    assert specs[0] == specs[1]
    assert specs[0].window == SlidingWindow(9, (0, 2), rope_theta=3e4)


def test_gemmas_absent_settings_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    absent = dict.fromkeys(
        (
            *("rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window"),
            *("sliding_window_pattern", "max_position_embeddings", "tie_word_embeddings"),
            *("query_pre_attn_scalar", "hidden_activation"),
        )
    )
    spec = spec_of(with_config(tmp_path, absent, tiny.GEMMA3))
    assert spec.window == SlidingWindow(4096, (0, 1, 2, 3), rope_theta=10000.0)  # each sixth has none
    assert (spec.context_length, spec.rope_theta, spec.rope_factors) == (131_072, 1e6, None)
    assert spec.attention_scale == 1 / 16
    assert spec.tied_embeddings


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_model_that_sees_images_too_the_part_for_text_is_read(tmp_path: Path, prefix: str) -> None:
    text = tiny.write_hf(tiny.GEMMA3, tmp_path / "text" / "model")
    both = tiny.write_hf(tiny.GEMMA3, tmp_path / "both" / "model")
    weights = {
        prefix + name.removeprefix("model."): value for name, value in load_file(text / WEIGHTS).items()
    }
    other = prefix.removesuffix("language_model.") if prefix.startswith("model.") else ""
    for part in ("vision_tower.embeddings.weight", "multi_modal_projector.norm.weight"):
        weights[other + part] = np.ones((2, 2), np.float32)
    weights["language_model.lm_head.weight"] = np.ones((320, 64), np.float32)  # a copy of the table
    save_file(weights, both / WEIGHTS)
    config = {"model_type": "gemma3", "text_config": tiny.config(tiny.GEMMA3), "vision_config": {}}
    (both / "config.json").write_text(json.dumps(config))
    with open_checkpoint(text) as one, open_checkpoint(both) as other_one:
        assert other_one.spec == one.spec
        for name in ("embed", "layers.2.k", "final_norm"):
            np.testing.assert_array_equal(other_one.tensor(name), one.tensor(name))
    (both / "config.json").write_text(json.dumps(config | {"quantization_config": {}}))
    assert "the weights are quantised" in refusal(both, "config.json")


def test_a_part_for_images_is_no_part_of_a_model_for_text(tmp_path: Path) -> None:
    name = "vision_tower.embeddings.weight"
    folder = with_weights(tmp_path, {name: np.ones((2, 2), np.float32)}, tiny.GEMMA3)
    assert f"tensor {name!r} is not part of a gemma3 model" in refusal(folder)


def test_gemmas_norms_multiply_by_one_more_than_is_stored(tiny_models: dict[str, TinyPaths]) -> None:
    paths = tiny_models[tiny.GEMMA3.name]
    stored = load_file(paths.folder / WEIGHTS)
    with open_checkpoint(paths.folder) as folder, open_checkpoint(paths.gguf) as gguf:
        for name in ("layers.1.post_mlp_norm", "layers.0.q_norm", "final_norm"):
            np.testing.assert_array_equal(folder.tensor(name), gguf.tensor(name))
        np.testing.assert_array_equal(folder.tensor("final_norm"), stored["model.norm.weight"] + 1)
        np.testing.assert_array_equal(
            folder.tensor("layers.3.v"), stored["model.layers.3.self_attn.v_proj.weight"]
        )


def test_phi_3_is_read_up_to_the_length_before_it_was_stretched(
    tiny_models: dict[str, TinyPaths], caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(tiny_models[tiny.PHI3.name].folder)
    assert spec.family is Family.PHI3
    assert (spec.context_length, spec.window) == (256, SlidingWindow(12, (0, 1)))
    assert spec.rope_factors == tiny.SHORT_FACTORS
    assert spec.rope_magnitude == pytest.approx((1 + np.log(4) / np.log(256)) ** 0.5)
    assert not spec.tied_embeddings
    assert "its LongRoPE is supported up to its original context" in caplog.text


def test_tensors_that_are_one_in_the_file_are_read_as_its_rows(tiny_models: dict[str, TinyPaths]) -> None:
    paths = tiny_models[tiny.PHI3.name]
    stored = load_file(paths.folder / WEIGHTS)
    for path in (paths.folder, paths.gguf):
        with open_checkpoint(path) as checkpoint:
            qkv = stored["model.layers.1.self_attn.qkv_proj.weight"]
            for part, rows in (("q", slice(0, 64)), ("k", slice(64, 96)), ("v", slice(96, 128))):
                assert checkpoint.tensor_shape(f"layers.1.{part}") == qkv[rows].shape
                np.testing.assert_array_equal(checkpoint.tensor(f"layers.1.{part}"), qkv[rows])
            gate_up = stored["model.layers.0.mlp.gate_up_proj.weight"]
            np.testing.assert_array_equal(checkpoint.tensor("layers.0.up", slice(3, 9)), gate_up[99:105])
            np.testing.assert_array_equal(checkpoint.tensor("layers.0.up", slice(90, None)), gate_up[186:])


def test_rows_that_are_missing_of_several_in_one_are_refused_with_both_shapes(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.qkv_proj.weight"
    folder = with_weights(tmp_path, {name: np.ones((64, 64), np.float32)}, tiny.PHI3)
    assert refusal(folder) == (
        f"tensor {name!r} has shape [64, 64], but the model's settings make it [128, 64]"
    )


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({"sliding_window": None}, None),
        ({"sliding_window": 255}, SlidingWindow(255, (0, 1))),
        ({"sliding_window": 256}, None),
    ],
)
def test_phi_3_has_a_window_where_it_is_shorter_than_the_context(
    tmp_path: Path, settings: dict[str, Any], window: SlidingWindow | None
) -> None:
    assert spec_of(with_config(tmp_path, settings, tiny.PHI3)).window == window


LONG_ROPE = tiny.config(tiny.PHI3)["rope_scaling"]


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (tiny.GEMMA3, {"model_type": "gemma2"}, "architecture 'gemma2' is not supported"),
        (tiny.GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        (tiny.GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        (tiny.GEMMA3, {"use_bidirectional_attention": True}, "attends to later tokens"),
        (tiny.GEMMA3, {"hidden_activation": "silu"}, "activation 'silu' is not supported"),
        (tiny.GEMMA3, {"sliding_window": 0}, "sliding_window is 0; it must be a whole number from 1"),
        (tiny.GEMMA3, {"layer_types": ["full_attention"]}, "layer_types names 1 layers, but there are 4"),
        (
            tiny.GEMMA3,
            {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
            "supported are default and linear",
        ),
        (
            tiny.GEMMA3,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "layers with a window by the 'linear' method",
        ),
        (
            tiny.PHI3,
            {"rope_scaling": {"type": "yarn"}},
            "by the 'yarn' method; supported are default and longrope",
        ),
        (
            tiny.PHI3,
            {"rope_scaling": {**LONG_ROPE, "short_factor": [1.0]}},
            "it must be a list of 8 positive",
        ),
        (
            tiny.PHI3,
            {"rope_scaling": {**LONG_ROPE, "short_factor": [0] * 8}},
            "short_factor is 0; it must be",
        ),
        (tiny.PHI3, {"original_max_position_embeddings": 1}, "original_max_position_embeddings is 1"),
        (tiny.PHI3, {"partial_rotary_factor": 0.75}, "rotates a part of each head only"),
    ],
)
def test_what_is_not_supported_of_gemma_3_and_phi_3_is_refused_by_name(
    tmp_path: Path, model: tiny.TinyModel, settings: dict[str, Any], message: str
) -> None:
    assert message in refusal(with_config(tmp_path, settings, model), "config.json")
