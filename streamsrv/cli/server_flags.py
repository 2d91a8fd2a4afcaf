"""The flags that say which server a command calls, and how: the same for all commands."""

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from streamsrv.cli.flag_values import check_seconds
from streamsrv.config import API_KEY_VARIABLE, CLIENT_VARIABLE, Address
from streamsrv.errors import SettingsError

if TYPE_CHECKING:
    import grpc

    from streamsrv.tls import KeyPair

_DEFAULT_SERVER = "127.0.0.1:50051"
_DEFAULT_ADMIN = "127.0.0.1:50052"
_MAX_TIMEOUT_S = 1e6  # 11 days, and well within what gRPC can say


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """What the flags say: checked, and their files read."""

    address: Address
    ca: Path | None = None
    """Authorities to trust; None for this system's."""
    pair: "KeyPair | None" = None
    """A certificate to show."""
    credentials: "grpc.ChannelCredentials | None" = None
    """None for plain text."""
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float | None = None
    """For a call."""

    @property
    def target(self) -> str:
        """The address as gRPC takes it."""
        return str(self.address)

    def channel(self) -> "grpc.aio.Channel":
        """Open a channel for a single call."""
        import grpc

        if self.credentials is None:
            return grpc.aio.insecure_channel(self.target)
        return grpc.aio.secure_channel(self.target, self.credentials)


def add_server_flags(
    parser: argparse.ArgumentParser, *, is_admin: bool = False, timeout_s: float | None = None
) -> None:
    """Add the flags, with those defaults in which commands differ."""
    add = parser.add_argument_group("the server").add_argument
    parser.set_defaults(is_admin=is_admin)
    if is_admin:
        add(
            "--server",
            default=_DEFAULT_ADMIN,
            metavar="HOST:PORT",
            help="the server's --admin-listen (default: %(default)s)",
        )
    else:
        add(
            "--server",
            metavar="HOST:PORT",
            help=f"the server; or {CLIENT_VARIABLE} (default: {_DEFAULT_SERVER})",
        )
    add(
        "--timeout",
        type=float,
        default=timeout_s,
        metavar="S",
        help="give a call up that takes longer than S seconds "
        f"(default: {'never' if timeout_s is None else f'{timeout_s:g}'})",
    )
    add(
        "--tls", action="store_true", help="connect over TLS, to a server that this system's authorities know"
    )
    add("--tls-ca", type=Path, metavar="FILE", help="TLS with the authorities in this PEM file instead")
    add("--tls-cert", type=Path, metavar="FILE", help="TLS with a certificate of your own, in a PEM file")
    add("--tls-key", type=Path, metavar="FILE", help="PEM file with that certificate's private key")
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        # No flag takes the key itself: everyone on a machine can read its processes' command lines.
        help=f"file with your API key and nothing else; or the key itself in {API_KEY_VARIABLE}",
    )


def server_of(arguments: argparse.Namespace) -> ServerChoice:
    """Read the flags.

    Raises:
        SettingsError: the address or the time is none, a flag is without the other that it needs, or a file
            is unusable.
    """
    from streamsrv.tls import KeyPair, channel_credentials

    address = _address(arguments.server)
    timeout_s, ca = arguments.timeout, arguments.tls_ca
    cert, key = arguments.tls_cert, arguments.tls_key
    check_seconds("--timeout", timeout_s, _MAX_TIMEOUT_S)
    if (cert is None) != (key is None):
        given, missing = ("--tls-cert", "--tls-key") if cert else ("--tls-key", "--tls-cert")
        raise SettingsError(f"{given} is given without {missing}; a certificate of your own needs both")
    pair = KeyPair(cert, key) if cert else None
    credentials = channel_credentials(ca=ca, pair=pair) if arguments.tls or ca or pair else None
    return ServerChoice(address, ca, pair, credentials, _api_key(arguments.api_key_file), timeout_s)


def _address(flag: str | None) -> Address:
    text, name = flag, "--server"
    if text is None:
        text, name = os.environ.get(CLIENT_VARIABLE) or _DEFAULT_SERVER, CLIENT_VARIABLE
    address = Address.parse(text, name)
    if "/" in address.host:
        raise SettingsError(f"{name} is {text!r}; it must be HOST:PORT alone, without http:// or a path")
    if not address.port:
        raise SettingsError(f"{name} is {text!r}; a server is called at a port from 1 to 65535")
    return address


def _api_key(path: Path | None) -> str | None:
    if path is None:
        return _checked(os.environ.get(API_KEY_VARIABLE, ""), API_KEY_VARIABLE)
    from streamsrv.watched_files import read_file

    key = _checked(read_file(path).decode("utf-8", "replace"), str(path))
    if key is None:
        raise SettingsError(f"{path} is empty; it must hold the API key")
    return key


def _checked(text: str, origin: str) -> str | None:
    key = text.strip()
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise SettingsError(f"{origin} is not an API key: it must be one word of ASCII characters")
    return key or None
