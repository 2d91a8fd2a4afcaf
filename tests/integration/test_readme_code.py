"""The README's Python, run as it stands there."""

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.scripted import DEFAULT_SCRIPT, ScriptedEngine
from streamsrv.client import Client
from streamsrv.config import Settings
from streamsrv.opening import open_model
from tests.integration.test_service import Gate
from tests.proxy import FaultyProxy
from tests.servers import running, until

README = (Path(__file__).parents[2] / "README.md").read_text()


def code(containing: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if containing in block]
    return str(block)


@pytest.mark.parametrize("containing", ["import Client\n\n\nasync def main", "for text in stream.texts()"])
async def test_an_example_streams_from_a_server(containing: str) -> None:
    async with running() as server:
        source = code(containing).replace("127.0.0.1:50051", server.target)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-c", source), stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        assert process.returncode == 0
        assert DEFAULT_SCRIPT[:80] in output.decode()


async def test_the_example_of_structured_output_gives_json_and_a_choice(
    demo_path: Path, tmp_path: Path
) -> None:
    settings = Settings(model=str(demo_path), cache_dir=tmp_path, kv_cache_gib=0.25)
    engine = await asyncio.to_thread(open_model, settings)
    async with running(engine) as server:
        source = code("json_schema=schema").replace("127.0.0.1:50051", server.target)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-c", source), stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        assert process.returncode == 0
        described, choice = output.decode().splitlines()[0], output.decode().splitlines()[-1]
        assert described.startswith("{")
        assert choice in (" Paris", " London")
    engine.close()


async def test_the_example_of_going_on_elsewhere_gives_the_whole_answer() -> None:
    names: dict[str, Any] = {}
    exec(code("StreamIncompleteError as error"), names)
    gate = Gate()
    async with (
        running() as other,
        running(ScriptedEngine(before_step=gate), max_resume_window_s=1.0) as server,
        FaultyProxy(server.target) as proxy,
        Client(proxy.target) as client,
    ):
        answering = asyncio.ensure_future(names["answer"](client, other.client, "x", 1000))
        gate.let_through(40)
        await until(lambda: server.pool.num_steps >= 40)
        proxy.lead_to(other.target)
        proxy.cut_all()
        gate.open_for_good()
        assert await answering == DEFAULT_SCRIPT
