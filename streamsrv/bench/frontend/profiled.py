"""Run `streamsrv` with a sampler in it.

    python -m streamsrv.bench.frontend.profiled FILE ARGUMENT ...

Samples from when FILE.begin is there to when FILE.end is, and writes what it saw to FILE.
"""

import json
import runpy
import sys
import threading
import time
from pathlib import Path

from streamsrv.bench.frontend.sampler import Profile, Sampler

_LOOK_S = 0.02


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile for `read_profile`; the file is there when all of it is."""
    value = {
        "total_s": profile.total_s,
        "threads_s": dict(profile.threads_s),
        "own_s": dict(profile.own_s),
        "all_s": dict(profile.all_s),
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(path)


def read_profile(path: Path) -> Profile:
    """Read what `write_profile` wrote."""
    value = json.loads(path.read_text())
    profile = Profile(value["total_s"])
    for name in ("threads_s", "own_s", "all_s"):
        getattr(profile, name).update(value[name])
    return profile


def begin_file(path: Path) -> Path:
    """What makes the sampler begin."""
    return path.with_suffix(".begin")


def end_file(path: Path) -> Path:
    """What makes it end."""
    return path.with_suffix(".end")


def _watch(path: Path, sampler: Sampler) -> None:
    while not begin_file(path).exists():
        time.sleep(_LOOK_S)
    sampler.start()
    while not end_file(path).exists():
        time.sleep(_LOOK_S)
    write_profile(path, sampler.stop())


def main() -> None:
    """Watch for the files on a thread beside the server."""
    path = Path(sys.argv[1])
    threading.Thread(target=_watch, args=(path, Sampler()), name="profile", daemon=True).start()
    sys.argv = ["streamsrv", *sys.argv[2:]]
    runpy.run_module("streamsrv", run_name="__main__")  # by name: the commands are a layer above


if __name__ == "__main__":
    main()
