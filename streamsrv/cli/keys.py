"""`streamsrv keys`."""

import argparse
import sys
from typing import Any

from streamsrv.api_keys import key_line, new_key


def add_command(commands: Any) -> None:  # argparse's own type for it is private
    """Add the command to the program's."""
    keys = commands.add_parser("keys", help="make API keys", description="Make API keys.")
    actions = keys.add_subparsers(metavar="ACTION", required=True)
    new = actions.add_parser(
        "new",
        help="make a key",
        description="Make a key for a caller. Prints the key on standard error, once and nowhere else, and "
        "on standard output the line that lets it in, for the file that 'streamsrv serve --api-keys FILE' "
        "reads: streamsrv keys new alice >> FILE",
    )
    new.add_argument("name", metavar="NAME", help="who the key is for; one caller may have several")
    new.set_defaults(command=_new)


def _new(arguments: argparse.Namespace) -> None:
    key = new_key()
    line = key_line(arguments.name, key)
    print(f"the key of {arguments.name}, which is shown only now: {key}", file=sys.stderr)
    print(line)
