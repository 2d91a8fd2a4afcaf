"""What can be compared: how it is installed, fed and run."""

from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from streamsrv.bench.peers.environment import PeerEnvironment
from streamsrv.bench.peers.figures import PeerStream


class Contestant(Protocol):
    """Something that runs, ours or a peer's."""

    @property
    def pid(self) -> int:
        """The process that computes."""
        ...

    @property
    def version(self) -> str:
        """Its version, with what matters of how it was built."""
        ...

    async def run(self, prompts: Seq[Seq[int]], max_tokens: int) -> list[PeerStream]:
        """Generate `max_tokens` for each prompt, greedily, all at the same time.

        Raises:
            BenchError: it failed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine or server that others wrote."""

    name: str
    requirements: tuple[str, ...]
    """For pip: ranges of versions that this was tested with."""
    precision: str
    """Of weights, and of the cache where it is another."""
    driven: str
    """How it is driven, for the text above the table."""
    module: str
    """In `workers`."""
    convert: Callable[[Path, PeerEnvironment], Awaitable[Path]]
    """Make what the module opens out of a GGUF file, once."""
    unwanted: tuple[str, ...] = ()
    """Packages that the requirements bring, and that are taken out again."""
