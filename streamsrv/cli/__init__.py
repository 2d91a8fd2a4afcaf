"""The command line."""

import argparse
import errno
import os
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

# Read when grpc is imported: its core's notes on each failed handshake would stand between, or after, what
# a command says; and around each fork it would wait for its threads, though all that is forked here is
# another program's beginning.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from engines.api import StreamsrvError
from streamsrv import __version__
from streamsrv.cli import admin, bench, build, cache, generate, health, keys, models, serve
from streamsrv.cli.hints import hint
from streamsrv.cli.interrupts import CommandInterruptedError

_INTERRUPTED = 130
# Disks, quotas and devices that take no more.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: Seq[str] | None = None) -> None:
    """Run a command and exit: 0 if it did its work, 1 if it could not, 2 for wrong usage, 130 for Ctrl-C."""
    _open_standard_streams()
    sys.exit(run(argv))


def run(argv: Seq[str] | None = None) -> int:
    """Run a command; its exit code. A user's mistake is a sentence on standard error, never a traceback."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], None] = arguments.command
    try:
        command(arguments)
        sys.stdout.flush()  # what cannot be written is to be told, too
    except CommandInterruptedError as error:
        print(f"streamsrv: {error}", file=sys.stderr)
        return _INTERRUPTED
    except StreamsrvError as error:
        what_to_do = hint(error, arguments)
        text = f"{str(error).rstrip('.!')}. {what_to_do}" if what_to_do else str(error)
        print(f"streamsrv: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; there is nobody to tell.
        _drop_output()
        return 1
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        print(f"streamsrv: cannot write the output: {error.strerror}", file=sys.stderr)
        _drop_output()
        return 1
    return 0


def _drop_output() -> None:
    """Write what is left in the buffer, and what comes, to nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_standard_streams() -> None:
    """Read nothing from, and write to nowhere, what whoever started this has closed (`>&-`).

    What is opened next would take its number, and libuv ends the process at such a one.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # by their numbers
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 (for good)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="streamsrv", description="A gRPC-first streaming inference server for language models."
    )
    parser.add_argument("--version", action="version", version=f"streamsrv {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (serve, build, generate, models, health, admin, bench, cache, keys):
        command.add_command(commands)
    return parser
