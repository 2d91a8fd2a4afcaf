"""API keys, and what belongs to whom, over gRPC."""

import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from engines.scripted import ScriptedEngine
from streamsrv.api_keys import key_line, new_key
from streamsrv.client import call_failed, make_request
from streamsrv.errors import CallFailedError
from streamsrv.v1 import inference_pb2 as pb
from tests.calls import Call
from tests.integration.test_resume import refusal
from tests.integration.test_service import WORDS, Gate
from tests.servers import TestServer, running, until

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]
ALICE, BOB, STRANGER = new_key(), new_key(), new_key()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# who may call\n{key_line('alice', ALICE)}\n{key_line('bob', BOB)}\n")
    return path


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


Metadata = tuple[tuple[str, str], ...] | None


def generate(server: TestServer, key: str, **options: Any) -> Call:
    request = make_request("x", **options)
    request.stream.resume_window_ms = 20_000
    return Call(server.client.stub.Generate(request, metadata=bearer(key)))


def resume(server: TestServer, key: str, **fields: Any) -> Call:
    return Call(server.client.stub.Resume(pb.ResumeRequest(**fields), metadata=bearer(key)))


async def cancel(server: TestServer, key: str, **fields: Any) -> str:
    answer = await server.client.stub.Cancel(pb.CancelRequest(**fields), metadata=bearer(key))
    return pb.CancelResult.Name(answer.result).removeprefix("CANCEL_RESULT_")


async def status_of(server: TestServer, method: Any, metadata: Metadata, request: bytes = b"") -> Any:
    """What a method of the contract, whatever its kind, answers to some bytes."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    assert not method.client_streaming
    async with grpc.aio.insecure_channel(server.target) as channel:
        kinds: Any = channel  # its type stubs want a serializer
        read = GetMessageClass(method.output_type).FromString
        try:
            if method.server_streaming:
                call = kinds.unary_stream(path, response_deserializer=read)(request, metadata=metadata)
                async for _ in call:
                    pass
            else:
                await kinds.unary_unary(path, response_deserializer=read)(request, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return call_failed(error)
    return None


async def known(server: TestServer, key: str) -> bool:
    call = server.client.stub.ListModels(pb.ListModelsRequest(), metadata=bearer(key))
    code = await call.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)
    return code is grpc.StatusCode.OK


def write(path: Path, text: str) -> None:
    path.write_text(text)


async def test_a_known_key_is_let_in(keys: Path) -> None:
    async with running(ScriptedEngine(WORDS), api_keys=keys) as server:
        assert (await generate(server, ALICE).rest()).text == WORDS
        assert await known(server, BOB)
        assert await known(server, ALICE)


@pytest.mark.parametrize("method", list(SERVICE.methods), ids=lambda method: method.name)
async def test_every_method_refuses_a_call_without_a_key(method: Any, keys: Path) -> None:
    async with running(api_keys=keys) as server:
        for metadata in (None, bearer(STRANGER)):
            error = await status_of(server, method, metadata)
            assert isinstance(error, CallFailedError)
            assert (error.code, error.server_reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
        error = await status_of(server, method, bearer(ALICE))
        assert error is None or error.code != "UNAUTHENTICATED"


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ((), "has no API key; send the metadata 'authorization: Bearer KEY'"),
        (bearer(STRANGER), "not one that is let in here"),
        (bearer(ALICE[:-1]), "not one that is let in here"),
        (bearer("alice"), "not one that is let in here"),
        ((("authorization", f"Basic {ALICE}"),), "not of the form 'Bearer KEY'"),
        ((("authorization", ALICE),), "not of the form 'Bearer KEY'"),
        ((("authorization", "Bearer"),), "not of the form 'Bearer KEY'"),
        ((("authorization", "Bearer "),), "not of the form 'Bearer KEY'"),
        (bearer(STRANGER) + bearer(ALICE), "given once"),
        ((("x-api-key", ALICE),), "has no API key"),
    ],
)
async def test_what_is_not_one_known_key_is_refused_and_the_key_is_not_repeated(
    metadata: Metadata, said: str, keys: Path
) -> None:
    async with running(api_keys=keys) as server:
        error = await refusal(Call(server.client.stub.Generate(make_request("x"), metadata=metadata)))
        assert (error.code, error.server_reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
        assert said in str(error)
        assert ALICE[:-1] not in str(error)
        assert STRANGER not in str(error)


async def test_the_scheme_may_be_written_in_any_case(keys: Path) -> None:
    async with running(api_keys=keys) as server:
        for scheme in ("bearer", "BEARER"):
            await server.client.stub.ListModels(
                pb.ListModelsRequest(), metadata=(("authorization", f"{scheme} {ALICE}"),)
            )


async def test_a_refused_call_does_no_work_and_its_message_is_not_read(keys: Path) -> None:
    steps: list[object] = []
    engine = ScriptedEngine(WORDS, before_step=steps.append)
    async with running(engine, api_keys=keys, max_message_mib=1) as server:
        method = SERVICE.methods_by_name["Generate"]
        for request in (make_request("x").SerializeToString(), b"\xff no message", bytes(8 << 20)):
            error = await status_of(server, method, bearer(STRANGER), request)
            assert error.code == "UNAUTHENTICATED"
        assert not steps
        call = await generate(server, ALICE).rest()
        assert call.stream_id.endswith("-1"), "refused calls took no stream ids"


async def test_health_needs_no_key_and_reflection_does(keys: Path) -> None:
    async with running(api_keys=keys) as server:
        for method in health_pb2.DESCRIPTOR.services_by_name["Health"].methods:
            if method.name != "Watch":  # which does not end
                assert await status_of(server, method, None) is None
        async with grpc.aio.insecure_channel(server.target) as channel:
            make_stub: Any = reflection_pb2_grpc.ServerReflectionStub
            stub = make_stub(channel)
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await stub.ServerReflectionInfo(iter([question])).read()
            answer = await stub.ServerReflectionInfo(iter([question]), metadata=bearer(ALICE)).read()
            assert SERVICE.full_name in [s.name for s in answer.list_services_response.service]


async def test_methods_that_do_not_exist_and_look_like_health_are_not_let_in(keys: Path) -> None:
    async with running(api_keys=keys) as server, grpc.aio.insecure_channel(server.target) as channel:
        kinds: Any = channel  # its type stubs want a serializer
        for path in ("/no.Such/Method", "/grpc.health.v1.HealthX/Check", f"/{SERVICE.full_name}/NoSuch"):
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await kinds.unary_unary(path)(b"")


async def test_a_changed_file_takes_effect_with_the_next_call_and_live_streams_go_on(keys: Path) -> None:
    gate = Gate()
    async with running(ScriptedEngine(WORDS, before_step=gate), api_keys=keys) as server:
        call = generate(server, ALICE)
        await call.read()
        write(keys, key_line("carol", STRANGER))
        assert not await known(server, ALICE)
        assert await known(server, STRANGER)
        gate.open_for_good()
        assert (await call.rest()).text == WORDS
        write(keys, "")
        assert not await known(server, STRANGER)


async def test_a_broken_file_leaves_the_old_keys_in_force_and_is_logged_once(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(api_keys=keys) as server:
        write(keys, f"{key_line('carol', STRANGER)}\nalice {ALICE}\n")
        for _ in range(3):
            assert await known(server, ALICE)
            assert not await known(server, STRANGER)
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1
        assert "keys, line 2" in errors[0]
        assert ALICE not in caplog.text


async def test_a_file_without_keys_refuses_every_call_and_says_so_at_the_start(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(keys, "# none yet\n")
    async with running(api_keys=keys) as server:
        assert "has no keys: every call is refused" in caplog.text
        assert not await known(server, ALICE)


async def test_without_a_file_of_keys_none_is_asked_for() -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        assert await known(server, STRANGER)


async def test_a_caller_resumes_its_own_streams_without_a_token(keys: Path) -> None:
    async with running(ScriptedEngine(WORDS), api_keys=keys) as server:
        call = await generate(server, ALICE, request_id="mine").rest()
        for target in ({"request_id": "mine"}, {"stream_id": call.stream_id}):
            assert (await resume(server, ALICE, **target).rest()).text == WORDS
            error = await refusal(resume(server, ALICE, resume_token=b"wrong", **target))
            assert error.server_reason == "STREAM_NOT_FOUND"


async def test_another_caller_finds_no_such_stream_unless_it_was_given_the_token(keys: Path) -> None:
    async with running(ScriptedEngine(WORDS), api_keys=keys) as server:
        call = await generate(server, ALICE, request_id="mine").rest()
        token = call.start.resume_token
        for fields in (
            {"request_id": "mine"},
            {"request_id": "mine", "resume_token": token},
            {"stream_id": call.stream_id},
            {"stream_id": call.stream_id, "resume_token": token[::-1]},
        ):
            error = await refusal(resume(server, BOB, **fields))
            assert (error.code, error.server_reason) == ("NOT_FOUND", "STREAM_NOT_FOUND")
        given = await resume(server, BOB, stream_id=call.stream_id, resume_token=token).rest()
        assert given.text == WORDS


async def test_another_caller_cannot_cancel_a_stream(keys: Path) -> None:
    async with running(ScriptedEngine(WORDS, step_s=0.005), api_keys=keys) as server:
        call = generate(server, ALICE, request_id="mine", ignore_eos=True)
        await call.read()
        for fields in ({"request_id": "mine"}, {"stream_id": call.stream_id}):
            assert await cancel(server, BOB, **fields) == "NOT_FOUND"
        assert server.pool.num_running == 1
        assert await cancel(server, ALICE, request_id="mine") == "ABORTED"
        assert (await call.rest()).ended


async def test_callers_do_not_get_in_each_others_way_with_request_ids(keys: Path) -> None:
    gate = Gate()
    async with running(ScriptedEngine(WORDS, before_step=gate), api_keys=keys) as server:
        hers, his = (generate(server, key, request_id="mine") for key in (ALICE, BOB))
        await hers.read()
        await his.read()
        error = await refusal(generate(server, ALICE, request_id="mine"))
        assert error.server_reason == "REQUEST_ID_IN_USE"
        assert hers.stream_id in str(error)
        gate.open_for_good()
        assert (await hers.rest()).text == (await his.rest()).text == WORDS


async def test_each_caller_has_its_own_share_of_the_queue(keys: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(WORDS, before_step=gate)
    async with running(engine, api_keys=keys, max_running=1, max_waiting_per_caller=1) as server:
        calls = []
        for key in (ALICE, ALICE, BOB):
            calls.append(generate(server, key))
            await calls[-1].read()
            await until(lambda: server.pool.num_waiting == len(calls) - 1)
        for key, name in ((ALICE, "alice"), (BOB, "bob")):
            error = await refusal(generate(server, key))
            assert error.server_reason == "CALLER_SHARE_USED"
            assert f"requests of {name} are waiting" in str(error)
        gate.open_for_good()
        for call in calls:
            assert (await call.rest()).text == WORDS


async def test_a_client_cannot_take_the_names_that_the_server_is_about_to_give() -> None:
    gate = Gate()
    async with running(ScriptedEngine(WORDS, before_step=gate)) as server:
        taken = [f"{server.pool.instance_id}-{number}" for number in (2, 3, 5)]
        calls = []
        for name in (*taken, "", "", "", ""):
            calls.append(Call(server.client.stub.Generate(make_request("x", request_id=name))))
            await calls[-1].read()
        assert len({call.start.request_id for call in calls}) == len({c.stream_id for c in calls}) == 7
        gate.open_for_good()
        for call in calls:
            assert (await call.rest()).text == WORDS
