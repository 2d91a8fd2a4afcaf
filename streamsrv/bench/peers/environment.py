"""A virtual environment of a peer's own, made once and used again."""

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

from engines.filelock import FileLock
from streamsrv.bench.errors import BenchError

_STAMP = "made-from.json"
_MODELS = "models"


class PeerEnvironment:
    """A folder with an interpreter that has a peer's packages, and the models converted for it."""

    def __init__(self, folder: Path, requirements: Seq[str], unwanted: Seq[str] = ()) -> None:
        """Where these have changed, all is made anew.

        Args:
            folder: where it is, or is to be.
            requirements: what pip is given.
            unwanted: packages that come with them and are taken out again.
        """
        self._folder = folder
        self._requirements = list(requirements)
        self._unwanted = list(unwanted)

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self._folder / "bin" / "python"

    @property
    def log(self) -> Path:
        """What the peer says on standard error."""
        return self._folder / "peer.log"

    async def make(self, say: Callable[[str], None]) -> None:
        """Make it, unless it is there.

        Raises:
            BenchError: the packages could not be installed.
        """
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self._folder.with_suffix(".lock")) as lock:
            lock.exclusive()
            if self._is_made():
                return
            say(f"installing {', '.join(self._requirements)} into {self._folder}")
            shutil.rmtree(self._folder, ignore_errors=True)
            await run_tool([sys.executable, "-m", "venv", str(self._folder)])
            pip = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
            await run_tool([*pip, "install", "--quiet", "--only-binary", ":all:", *self._requirements])
            if self._unwanted:
                await run_tool([*pip, "uninstall", "--quiet", "--yes", *self._unwanted])
            (self._folder / _STAMP).write_text(json.dumps(self._state()))

    def model(self, key: str) -> Path:
        """Name the folder of a conversion; `key` says of what and into what."""
        return self._folder / _MODELS / key

    def _is_made(self) -> bool:
        try:
            return bool(json.loads((self._folder / _STAMP).read_text()) == self._state())
        except (OSError, ValueError):
            return False

    def _state(self) -> dict[str, object]:
        return {
            "packages": [self._requirements, self._unwanted],
            "python": sys.version,
            "folder": str(self._folder),
        }


async def run_tool(command: Seq[str]) -> None:
    """Run a program to its end.

    Raises:
        BenchError: it failed; its last words are mentioned.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise BenchError(last_line(output) or f"{command[0]} exited with {process.returncode}")


def last_line(output: bytes) -> str:
    """Give the last line that says something."""
    lines = output.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
