"""`streamsrv cache`."""

import argparse
import time
from pathlib import Path
from typing import Any

from streamsrv.config import ENV_PREFIX, load_settings


def add_command(commands: Any) -> None:  # argparse's own type for it is private
    """Add the command to the program's."""
    cache = commands.add_parser(
        "cache",
        help="show or clear the prepared models",
        description="Show the prepared models that are kept to make later starts fast, or remove them.",
    )
    cache.add_argument("action", choices=["show", "clear"], nargs="?", default="show")
    cache.add_argument(
        "--cache-dir", type=Path, metavar="DIR", help=f"where they are; or {ENV_PREFIX}CACHE_DIR"
    )
    cache.set_defaults(command=_cache)


def _cache(arguments: argparse.Namespace) -> None:
    from engines.prepared import PreparedModels

    flags = {} if arguments.cache_dir is None else {"cache_dir": arguments.cache_dir}
    settings = load_settings(flags)
    prepared = PreparedModels(settings.cache_dir, settings.cache_dir_gib)
    if arguments.action == "clear":
        print(f"removed {prepared.clear() / 2**20:,.0f} MiB from {prepared.folder}")
        return
    entries = prepared.entries()
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used))
        print(f"{entry.size_bytes / 2**20:>10,.0f} MiB  used {used}  {entry.name} ({entry.form.label})")
    total = sum(entry.size_bytes for entry in entries)
    print(
        f"{len(entries)} prepared models, {total / 2**20:,.0f} MiB of {settings.cache_dir_gib:g} GiB, "
        f"in {prepared.folder}"
    )
