"""The flags that say which server a command calls, and how."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from streamsrv.config import API_KEY_VARIABLE, CLIENT_VARIABLE, Address
from streamsrv.errors import SettingsError

if TYPE_CHECKING:
    import grpc

_DEFAULT_SERVER = "127.0.0.1:50051"


def add_server_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the server to call."""
    parser.add_argument(
        "--server",
        default=os.environ.get(CLIENT_VARIABLE) or _DEFAULT_SERVER,
        metavar="HOST:PORT",
        help=f"the server; or {CLIENT_VARIABLE} (default: {_DEFAULT_SERVER})",
    )


def add_tls_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for a server with TLS, and perhaps with client certificates."""
    add = parser.add_argument
    add(
        "--tls", action="store_true", help="connect over TLS, to a server that this system's authorities know"
    )
    add(
        "--tls-ca", type=Path, metavar="FILE", help="with TLS: PEM file with the authorities to trust instead"
    )
    add("--tls-cert", type=Path, metavar="FILE", help="with TLS: PEM file with a certificate of your own")
    add("--tls-key", type=Path, metavar="FILE", help="PEM file with that certificate's private key")


def add_api_key_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag for a server that asks for API keys."""
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        # No flag takes the key itself: everyone on a machine can read its processes' command lines.
        help=f"file with your API key and nothing else; or the key itself in {API_KEY_VARIABLE}",
    )


def check_server(arguments: argparse.Namespace) -> None:
    """Refuse a server's name that is none.

    Raises:
        SettingsError: it is not HOST:PORT.
    """
    Address.parse(arguments.server, "--server")


def credentials_of(arguments: argparse.Namespace) -> "grpc.ChannelCredentials | None":
    """Make what the flags ask for; None for plain text.

    Raises:
        SettingsError: a flag is without the other that it needs, or a file is unusable.
    """
    cert, key = arguments.tls_cert, arguments.tls_key
    if (cert is None) != (key is None):
        given, missing = ("--tls-cert", "--tls-key") if cert else ("--tls-key", "--tls-cert")
        raise SettingsError(f"{given} is given without {missing}; a certificate of your own needs both")
    if not (arguments.tls or arguments.tls_ca or cert):
        return None
    from streamsrv.tls import KeyPair, channel_credentials

    return channel_credentials(ca=arguments.tls_ca, pair=KeyPair(cert, key) if cert else None)


def api_key_of(arguments: argparse.Namespace) -> str | None:
    """Read the API key, from the flag's file or the variable; None if there is none.

    Raises:
        SettingsError: the file cannot be read, or holds no key.
    """
    if arguments.api_key_file is None:
        return _checked(os.environ.get(API_KEY_VARIABLE, ""), API_KEY_VARIABLE)
    from streamsrv.watched_files import read_file

    key = _checked(read_file(arguments.api_key_file).decode("utf-8", "replace"), str(arguments.api_key_file))
    if key is None:
        raise SettingsError(f"{arguments.api_key_file} is empty; it must hold the API key")
    return key


def _checked(text: str, origin: str) -> str | None:
    key = text.strip()
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise SettingsError(f"{origin} is not an API key: it must be one word of ASCII characters")
    return key or None
