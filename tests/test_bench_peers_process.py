import subprocess
import sys
import zipfile
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from streamsrv.bench.errors import BenchError
from streamsrv.bench.peers.environment import PeerEnvironment, last_line, run_tool
from streamsrv.bench.peers.peer_process import PeerSize, peer_process

SIZE = PeerSize(num_threads=3, num_streams=4, num_cells=50)

TINY_PEER = """
import sys


def open_peer(model, *, num_threads, num_streams, num_cells):
    print("noise on standard output")
    if model == "refused":
        raise RuntimeError("no such model\\n  at all")
    if model == "dead":
        sys.exit("cannot map memory")
    return Peer(f"{model} {num_threads} {num_streams} {num_cells}")


class Peer:
    def __init__(self, version):
        self.version = version

    def describe(self):
        return {"version": self.version}

    def run(self, prompts, max_tokens):
        if max_tokens == 0:
            raise ValueError("nothing to do")
        return [([sum(prompt)] * max_tokens, [(0.5, max_tokens)]) for prompt in prompts]
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> PeerEnvironment:
    """An environment whose only package is a peer that adds up."""
    folder = tmp_path_factory.mktemp("peers") / "tiny"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "tiny_peer.py").write_text(TINY_PEER)
    return PeerEnvironment(folder, ["tiny"])


async def test_a_peer_runs_in_its_own_interpreter_with_the_size_it_is_told(
    environment: PeerEnvironment,
) -> None:
    async with peer_process(environment, "tiny_peer", Path("model"), SIZE) as peer:
        assert peer.ready == {"version": "model 3 4 50"}
        streams = await peer.run([[1, 2], [3]], 2)
    assert [stream.token_ids for stream in streams] == [(3, 3), (3, 3)]
    assert streams[0].arrivals == ((0.5, 2),)


async def test_a_peers_error_is_told_and_it_goes_on(environment: PeerEnvironment) -> None:
    async with peer_process(environment, "tiny_peer", Path("model"), SIZE) as peer:
        with pytest.raises(BenchError, match="ValueError: nothing to do"):
            await peer.run([[1]], 0)
        assert len(await peer.run([[1]], 1)) == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("refused", "RuntimeError: no such model at all"),
        ("dead", "its process ended: cannot map memory"),
    ],
)
async def test_a_peer_that_does_not_start_says_why(
    environment: PeerEnvironment, model: str, message: str
) -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(BenchError, match=message):
            await stack.enter_async_context(peer_process(environment, "tiny_peer", Path(model), SIZE))


async def test_a_package_that_is_not_there_is_named(environment: PeerEnvironment) -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(BenchError, match="openvino_genai"):
            await stack.enter_async_context(peer_process(environment, "openvino_loop", Path("m"), SIZE))


async def test_an_environment_is_made_once_and_anew_where_its_packages_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheel = tmp_path / "tiny_dist-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_dist.py", "VALUE = 5\n")
        info = "tiny_dist-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-dist\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    said: list[str] = []
    environment = PeerEnvironment(tmp_path / "tiny", [str(wheel)])
    await environment.make(said.append)
    await run_tool([str(environment.python), "-c", "import tiny_dist"])
    await environment.make(said.append)
    assert len(said) == 1
    changed = PeerEnvironment(tmp_path / "tiny", ["not-a-package-of-anyone"])
    with pytest.raises(BenchError, match="not-a-package-of-anyone"):
        await changed.make(said.append)
    assert len(said) == 2


def test_the_last_line_that_says_something_is_quoted() -> None:
    assert last_line(b"a\n  the reason \n\n \n") == "the reason"
    assert last_line(b"") == ""
