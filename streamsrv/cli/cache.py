"""`streamsrv cache`."""

import argparse
import time
from pathlib import Path
from typing import Any

from streamsrv.config import ENV_PREFIX, load_settings

_MIB = 2**20


def add_command(commands: Any) -> None:  # argparse's own type for it is private
    """Add the command to the program's."""
    cache = commands.add_parser(
        "cache",
        help="show or clear the prepared models and plans",
        description="Show the prepared models, and the plans that TensorRT built of them, which are kept to "
        "make later starts fast; or remove those that no process uses.",
    )
    cache.add_argument("action", choices=["show", "clear"], nargs="?", default="show")
    cache.add_argument(
        "--cache-dir", type=Path, metavar="DIR", help=f"where they are; or {ENV_PREFIX}CACHE_DIR"
    )
    cache.set_defaults(command=_cache)


def _cache(arguments: argparse.Namespace) -> None:
    from engines.plans import Plans
    from engines.prepared import PreparedModels

    flags = {} if arguments.cache_dir is None else {"cache_dir": arguments.cache_dir}
    settings = load_settings(flags)
    prepared = PreparedModels(settings.cache_dir, settings.cache_dir_gib)
    plans = Plans(prepared.folder, settings.cache_dir_gib)
    if arguments.action == "clear":
        print(f"removed {(prepared.clear() + plans.clear()) / _MIB:,.0f} MiB from {prepared.folder}")
        return
    models = [
        (entry.size_bytes, entry.last_used, f"{entry.name} ({entry.form.label})")
        for entry in prepared.entries()
    ]
    built = [(entry.size_bytes, entry.last_used, f"plan of {entry.title}") for entry in plans.entries()]
    for size_bytes, last_used, text in (*models, *built):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(last_used))
        print(f"{size_bytes / _MIB:>10,.0f} MiB  used {used}  {text}")
    total = sum(size_bytes for size_bytes, _, _ in (*models, *built))
    print(
        f"{len(models)} prepared models and {len(built)} plans, {total / _MIB:,.0f} MiB of "
        f"{settings.cache_dir_gib:g} GiB, in {prepared.folder}"
    )
