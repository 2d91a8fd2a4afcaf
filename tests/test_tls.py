"""Files of certificates and keys, before any connection; tests/integration/test_tls.py has those."""

from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from streamsrv.config import Settings
from streamsrv.errors import SettingsError
from streamsrv.server import open_tls
from streamsrv.tls import KeyPair, channel_credentials, server_credentials
from tests.certificates import Authority, private_key_pem


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture
def pair(authority: Authority) -> KeyPair:
    return authority.sign("server")


def rsa_key() -> bytes:
    key = rsa.generate_private_key(65537, 2048)
    return key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())


CURVE = ec.SECP256R1()


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("server.crt", None, "cannot read .*server.crt: No such file"),
        ("server.key", None, "cannot read .*server.key: No such file"),
        ("server.crt", b"", "server.crt holds no certificate in PEM form"),
        ("server.crt", b"\x30\x82\x01\x00", "server.crt holds no certificate in PEM form"),
        ("server.key", b"junk", "server.key is not a private key in PEM form"),
        ("server.key", private_key_pem(ec.generate_private_key(CURVE)), "key in .*server.key is not that of"),
        ("server.key", rsa_key(), "key in .*server.key is not that of the certificate in .*server.crt"),
        ("server.key", private_key_pem(ec.generate_private_key(CURVE), b"secret"), "server.key is encrypted"),
    ],
    ids=range(8),
)
def test_a_pair_that_cannot_be_used_is_refused_with_the_files_name(
    pair: KeyPair, file: str, content: bytes | None, said: str
) -> None:
    path = pair.cert.parent / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    for use in (lambda: server_credentials(pair), lambda: channel_credentials(pair=pair)):
        with pytest.raises(SettingsError, match=said) as caught:
            use()
        assert "\n" not in str(caught.value)


def test_a_folder_in_place_of_a_file_is_a_sentence(pair: KeyPair, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="Is a directory"):
        server_credentials(KeyPair(tmp_path, pair.key))


def test_authorities_that_cannot_be_used_are_refused_with_the_files_name(
    pair: KeyPair, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*nowhere\.pem"):
        server_credentials(pair, tmp_path / "nowhere.pem")
    with pytest.raises(SettingsError, match=r"server\.key holds no certificate"):
        server_credentials(pair, pair.key)
    with pytest.raises(SettingsError, match=r"server\.key holds no certificate"):
        channel_credentials(ca=pair.key)


def test_certificate_and_key_may_be_in_one_file_with_text_around_them(pair: KeyPair) -> None:
    pair.cert.write_bytes("Größe: 256 bits\n".encode() + pair.cert.read_bytes() + pair.key.read_bytes())
    server_credentials(KeyPair(pair.cert, pair.cert))


def test_without_a_certificate_there_is_no_tls() -> None:
    assert open_tls(Settings()) is None


def test_a_client_without_an_authority_of_its_own_trusts_those_of_the_system(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[bytes | None] = []
    monkeypatch.setattr(grpc, "ssl_channel_credentials", lambda roots: given.append(roots))
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    channel_credentials()
    assert given.pop() == authority.path.read_bytes()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    channel_credentials()
    assert given.pop() == authority.path.read_bytes()
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "none"))
    channel_credentials()
    assert given == [None]
