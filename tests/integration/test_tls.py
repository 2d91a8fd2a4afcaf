"""TLS and client certificates, over real sockets."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engines.scripted import ScriptedEngine
from streamsrv.client import make_request
from streamsrv.tls import KeyPair, channel_credentials
from streamsrv.v1 import inference_pb2 as pb
from streamsrv.v1.inference_pb2_grpc import InferenceServiceStub
from tests.calls import Call
from tests.certificates import Authority
from tests.integration.test_resume import refusal
from tests.integration.test_service import WORDS, Gate
from tests.servers import TestServer, running


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@asynccontextmanager
async def connected(
    server: TestServer, authority: Authority, pair: KeyPair | None = None
) -> AsyncIterator[Any]:
    """A connection of its own, for a client that trusts an authority and shows a certificate."""
    credentials = channel_credentials(ca=authority.path, pair=pair)
    # Without the option, channels in one process may share connections.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(server.target, credentials, options=options) as channel:
        yield InferenceServiceStub(channel)


def tls(pair: KeyPair, client_ca: Authority | None = None) -> dict[str, Any]:
    return {
        "tls_cert": pair.cert,
        "tls_key": pair.key,
        "tls_client_ca": client_ca.path if client_ca else None,
    }


async def served_certificate(server: TestServer) -> x509.Certificate:
    """The certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = server.target.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.close()
    return x509.load_der_x509_certificate(shown)


def certificate(pair: KeyPair) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pair.cert.read_bytes())


async def is_let_in(stub: Any) -> bool:
    code = await stub.ListModels(pb.ListModelsRequest()).code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    return code is grpc.StatusCode.OK


async def test_a_stream_goes_over_tls(authority: Authority) -> None:
    async with (
        running(ScriptedEngine(WORDS), **tls(authority.sign("server"))) as server,
        connected(server, authority) as stub,
    ):
        call = await Call(stub.Generate(make_request("x"))).rest()
        assert call.text == WORDS


async def test_a_client_in_plain_text_gets_nothing_from_a_server_with_tls(authority: Authority) -> None:
    async with (
        running(**tls(authority.sign("server"))) as server,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        assert not await is_let_in(InferenceServiceStub(channel))


async def test_a_client_refuses_a_server_of_another_authority(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    async with running(**tls(authority.sign("server"))) as server, connected(server, other) as stub:
        assert not await is_let_in(stub)


async def test_a_client_refuses_a_server_with_an_expired_certificate_or_another_name(
    authority: Authority,
) -> None:
    for pair in (
        authority.sign("server", days_left=-1),
        authority.sign("server", [x509.DNSName("elsewhere.example")]),
    ):
        async with running(**tls(pair)) as server, connected(server, authority) as stub:
            assert not await is_let_in(stub)


async def test_with_a_client_authority_every_client_needs_one_of_its_certificates(
    authority: Authority, tmp_path: Path
) -> None:
    clients, strangers = Authority(tmp_path, "clients"), Authority(tmp_path, "strangers")
    cases = (
        (None, False),
        (strangers.sign("mallory", []), False),
        (authority.sign("server-as-client"), False),
        (clients.sign("late", [], days_left=-1), False),
        (clients.sign("alice", []), True),
    )
    async with running(ScriptedEngine(WORDS), **tls(authority.sign("server"), clients)) as server:
        for pair, welcome in cases:
            async with connected(server, authority, pair) as stub:
                assert await is_let_in(stub) is welcome, pair
        credentials = channel_credentials(ca=authority.path)
        async with grpc.aio.secure_channel(server.target, credentials) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await health.Check(health_pb2.HealthCheckRequest())


async def test_who_a_certificate_names_resumes_and_cancels_its_own_streams_alone(
    authority: Authority,
) -> None:
    gate = Gate()
    engine = ScriptedEngine(WORDS, before_step=gate)
    alice, again, bob = (authority.sign(n, [], files=f) for n, f in [("a", "a"), ("a", "a2"), ("b", "b")])
    async with (
        running(engine, **tls(authority.sign("server"), authority)) as server,
        connected(server, authority, alice) as hers,
        connected(server, authority, again) as her_other,
        connected(server, authority, bob) as his,
    ):
        request = make_request("x", request_id="mine")
        request.stream.resume_window_ms = 20_000
        first = Call(hers.Generate(request))
        await first.read()
        error = await refusal(Call(his.Resume(pb.ResumeRequest(stream_id=first.stream_id))))
        assert (error.code, error.server_reason) == ("NOT_FOUND", "STREAM_NOT_FOUND")
        answer = await his.Cancel(pb.CancelRequest(stream_id=first.stream_id))
        assert answer.result == pb.CANCEL_RESULT_NOT_FOUND
        second = Call(her_other.Resume(pb.ResumeRequest(stream_id=first.stream_id)))
        await second.read()
        gate.open_for_good()
        assert (await second.rest()).text == WORDS
        answer = await hers.Cancel(pb.CancelRequest(stream_id=first.stream_id))
        assert answer.result == pb.CANCEL_RESULT_ALREADY_FINISHED


async def test_who_has_a_certificate_without_names_needs_the_token(authority: Authority) -> None:
    nameless = authority.sign(None, [], files="nameless")
    async with (
        running(ScriptedEngine(WORDS), **tls(authority.sign("server"), authority)) as server,
        connected(server, authority, nameless) as stub,
    ):
        request = make_request("x")
        request.stream.resume_window_ms = 20_000
        call = await Call(stub.Generate(request)).rest()
        target = pb.ResumeRequest(stream_id=call.stream_id)
        assert (await refusal(Call(stub.Resume(target)))).server_reason == "STREAM_NOT_FOUND"
        target.resume_token = call.start.resume_token
        assert (await Call(stub.Resume(target)).rest()).text == WORDS


async def test_a_changed_certificate_is_shown_to_new_connections_and_open_ones_go_on(
    authority: Authority,
) -> None:
    gate = Gate()
    pair = authority.sign("server")
    async with (
        running(ScriptedEngine(WORDS, before_step=gate), **tls(pair)) as server,
        connected(server, authority) as old,
    ):
        before = certificate(pair)
        assert await served_certificate(server) == before
        call = Call(old.Generate(make_request("x")))
        await call.read()
        authority.sign("server")
        assert certificate(pair) != before
        assert await served_certificate(server) == certificate(pair)
        async with connected(server, authority) as new:
            assert await is_let_in(new)
        gate.open_for_good()
        assert (await call.rest()).text == WORDS
        assert await is_let_in(old)


async def test_a_changed_client_authority_decides_about_new_connections(
    authority: Authority, tmp_path: Path
) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    of_old, of_new = old.sign("alice", []), new.sign("bob", [])
    async with running(**tls(authority.sign("server"), old)) as server:
        for is_changed in (False, True):
            if is_changed:
                old.path.write_bytes(new.path.read_bytes())
            for pair, welcome in ((of_old, not is_changed), (of_new, is_changed)):
                async with connected(server, authority, pair) as stub:
                    assert await is_let_in(stub) is welcome


async def test_a_broken_pair_leaves_the_old_one_in_force_and_is_logged_once(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pair = authority.sign("server")
    cert, key = pair.cert.read_bytes(), pair.key.read_bytes()
    other = authority.sign("other")

    def half_written() -> None:
        pair.cert.write_bytes(cert[:100])

    def of_another_key() -> None:
        pair.cert.write_bytes(other.cert.read_bytes())

    async with running(**tls(pair)) as server:
        before = await served_certificate(server)
        for broken, said in (
            (half_written, "server.crt holds no certificate"),
            (of_another_key, "server.key is not that of the certificate"),
            (pair.cert.unlink, "server.crt: No such file"),
        ):
            caplog.clear()
            broken()
            for _ in range(3):
                assert await served_certificate(server) == before
                async with connected(server, authority) as stub:
                    assert await is_let_in(stub)
            errors = [record for record in caplog.records if record.levelno == logging.ERROR]
            assert len(errors) == 1
            assert said in errors[0].getMessage()
            pair.cert.write_bytes(cert)
            pair.key.write_bytes(key)
            assert await served_certificate(server) == before
        authority.sign("server")
        assert await served_certificate(server) == certificate(pair) != before
