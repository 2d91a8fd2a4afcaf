"""Models made for a peer out of the checkpoint, once."""

import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from streamsrv.bench.peers.environment import PeerEnvironment


async def converted(
    environment: PeerEnvironment, key: str, convert: Callable[[Path], Awaitable[None]]
) -> Path:
    """Give the folder of a conversion; if it is not there, `convert` fills it.

    A conversion that fails or is interrupted leaves nothing behind.
    """
    folder = environment.model(key)
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        await convert(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
