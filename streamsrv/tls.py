"""Certificates and keys in PEM files, as gRPC's credentials of either end."""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from streamsrv.errors import SettingsError
from streamsrv.watched_files import WatchedFiles, read_file

# What OpenSSL calls a key of another certificate, the last where the kinds differ.
_MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Where one end's certificate is, with those between it and the authority's, and its private key."""

    cert: Path
    key: Path


def server_credentials(pair: KeyPair, client_ca: Path | None = None) -> grpc.ServerCredentials:
    """Make the credentials of one listening server, which reads changed files before its next handshake.

    With `client_ca`, clients must show a certificate of one of the authorities in it. Connections that are
    open stay as they are. Changed files that cannot be used leave what they said before in force.

    Raises:
        SettingsError: a file is missing, unreadable or not PEM, or the key is not the certificate's.
    """

    def parse(cert: bytes, key: bytes, *roots: bytes) -> grpc.ServerCertificateConfiguration:
        _check_pair(pair, cert, key)
        if client_ca is not None:
            _check_certificates(client_ca, roots[0])
        return grpc.ssl_server_certificate_configuration([(key, cert)], roots[0] if roots else None)

    paths = [pair.cert, pair.key] if client_ca is None else [pair.cert, pair.key, client_ca]
    files = WatchedFiles(paths, parse)
    used = files.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """What gRPC asks before each handshake but the first, on one of its threads; None: no change."""
        nonlocal used
        current = files.current()
        if current is used:
            return None
        used = current
        return current

    return grpc.dynamic_ssl_server_credentials(
        used,
        changed,  # type: ignore[arg-type]  # that None is no change is in its documentation alone
        require_client_authentication=client_ca is not None,
    )


def channel_credentials(*, ca: Path | None = None, pair: KeyPair | None = None) -> grpc.ChannelCredentials:
    """Make a client's credentials: it trusts the authorities in `ca`, or this system's, and shows `pair`.

    Raises:
        SettingsError: a file is missing, unreadable or not PEM, or the key is not the certificate's.
    """
    if ca is None:
        roots = _system_roots()
    else:
        roots = read_file(ca)
        _check_certificates(ca, roots)
    if pair is None:
        return grpc.ssl_channel_credentials(roots)
    cert, key = read_file(pair.cert), read_file(pair.key)
    _check_pair(pair, cert, key)
    return grpc.ssl_channel_credentials(roots, key, cert)


def _check_pair(pair: KeyPair, cert: bytes, key: bytes) -> None:
    _check_certificates(pair.cert, cert)

    def no_password() -> str:
        raise SettingsError(f"{pair.key} is encrypted; give one without a password")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _in_memory(cert) as cert_path, _in_memory(key) as key_path:
        try:
            context.load_cert_chain(cert_path, key_path, password=no_password)
        except ssl.SSLError as error:
            if error.reason in _MISMATCHES:
                raise SettingsError(
                    f"the key in {pair.key} is not that of the certificate in {pair.cert}; "
                    "give the two that were made together"
                ) from None
            raise SettingsError(
                f"{pair.key} is not a private key in PEM form; it must have a block that begins with "
                "-----BEGIN PRIVATE KEY-----"
            ) from None


def _check_certificates(path: Path, content: bytes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _in_memory(content) as memory_path:
        try:
            context.load_verify_locations(memory_path)
        except ssl.SSLError:
            raise SettingsError(
                f"{path} holds no certificate in PEM form; it must have a block that begins with "
                "-----BEGIN CERTIFICATE-----"
            ) from None


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Give a path to bytes in memory: OpenSSL reads paths alone, and what is checked must be what is used."""
    descriptor = os.memfd_create("pem")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _system_roots() -> bytes | None:
    """Read the authorities that this system trusts; None, for those that gRPC brings, where it has none."""
    paths = ssl.get_default_verify_paths()  # SSL_CERT_FILE and SSL_CERT_DIR are heard
    if paths.cafile:
        return read_file(Path(paths.cafile))
    if paths.capath:
        return b"\n".join(read_file(path) for path in sorted(Path(paths.capath).glob("*.pem"))) or None
    return None
