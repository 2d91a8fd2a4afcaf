"""The command line."""

import argparse
import os
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq

# Read when grpc is imported: its core's notes on each failed handshake would stand between, or after, what
# a command says.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from engines.api import StreamsrvError
from streamsrv import __version__
from streamsrv.cli import admin, bench, build, cache, generate, health, keys, models, serve
from streamsrv.errors import CallFailedError


def main(argv: Seq[str] | None = None) -> None:
    """Run a command and exit: 0 if it did its work, 1 if it could not, 2 for wrong usage, 130 for Ctrl-C."""
    sys.exit(run(argv))


def run(argv: Seq[str] | None = None) -> int:
    """Run a command; its exit code. A user's mistake is a sentence on standard error, never a traceback."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], None] = arguments.command
    try:
        command(arguments)
    except StreamsrvError as error:
        print(f"streamsrv: {error}{_hint(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _hint(error: StreamsrvError) -> str:
    """Say what to do where the message is grpc's own."""
    if isinstance(error, CallFailedError) and error.code == "UNAVAILABLE" and not error.server_reason:
        return ". Is a server running there? `streamsrv serve` starts one; --server names another"
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="streamsrv", description="A gRPC-first streaming inference server for language models."
    )
    parser.add_argument("--version", action="version", version=f"streamsrv {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (serve, build, generate, models, health, admin, bench, cache, keys):
        command.add_command(commands)
    return parser
