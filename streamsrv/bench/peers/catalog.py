"""The peers, by name."""

import asyncio
import hashlib
from importlib.resources import files
from pathlib import Path

from gguf.constants import GGMLQuantizationType

from streamsrv.bench.peers.conversion import converted
from streamsrv.bench.peers.environment import PeerEnvironment, run_tool
from streamsrv.bench.peers.gguf_copy import copy_gguf
from streamsrv.bench.peers.peer import Peer

DEFAULT_PEERS = ("openvino-genai", "llama.cpp")


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


async def _as_it_is(source: Path, _: PeerEnvironment) -> Path:
    return source


def _digest(source: Path) -> str:
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


_LLAMA_CPP = ("xllamacpp>=2026.10,<2026.11",)
_PEERS = (
    Peer(
        name="openvino-genai",
        requirements=("openvino-genai>=2026.4.1,<2026.5", "nncf>=3.4,<3.5"),
        precision="int8 per channel, cache f16",
        driven="its continuous batching stepped in process, with no server or client around it",
        module="openvino_loop",
        convert=_openvino_model,
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
)
PEERS = {peer.name: peer for peer in _PEERS}
