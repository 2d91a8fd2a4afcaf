"""Several models in one server, loaded and unloaded while others run."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engines.api import Engine
from engines.scripted import DEFAULT_SCRIPT, ScriptedEngine
from streamsrv import repository
from streamsrv.api_keys import key_line, new_key
from streamsrv.client import Client, Generation, call_failed
from streamsrv.config import Settings, load_settings
from streamsrv.errors import CallFailedError, ModelLoadError, SettingsError
from streamsrv.opening import open_model
from streamsrv.server import MODEL_PREFIX, RunningServer, serving
from streamsrv.v1 import admin_pb2 as apb
from streamsrv.v1 import inference_pb2 as pb
from streamsrv.v1.admin_pb2_grpc import AdminServiceStub
from tests.conftest import TinyPaths
from tests.scrape import http
from tests.servers import until

LONG = "word " * 200
SLOW = 'engine = "scripted"\nscript_step_ms = 5\nscript_text = "' + LONG.strip() + '"\n'
UNLOADED, READY, FAILED = apb.MODEL_STATE_UNLOADED, apb.MODEL_STATE_READY, apb.MODEL_STATE_FAILED


def script(folder: Path, name: str, text: str = DEFAULT_SCRIPT) -> None:
    (folder / f"{name}.toml").write_text(f'engine = "scripted"\nscript_text = "{text}"\n', "utf-8")


@dataclass(frozen=True, slots=True)
class Rig:
    """A server with a folder of models, and what calls it."""

    server: RunningServer
    client: Client
    admin: Any
    target: str

    async def load(self, model: str) -> apb.RepositoryModel:
        response: apb.LoadModelResponse = await self.admin.LoadModel(apb.LoadModelRequest(model=model))
        return response.model

    async def unload(self, model: str, grace_ms: int | None = None) -> apb.UnloadModelResponse:
        request = apb.UnloadModelRequest(model=model, grace_ms=grace_ms)
        response: apb.UnloadModelResponse = await self.admin.UnloadModel(request)
        return response

    async def states(self) -> dict[str, int]:
        response = await self.admin.ListRepository(apb.ListRepositoryRequest())
        return {model.name: model.state for model in response.models}

    async def names(self) -> list[str]:
        response = await self.client.stub.ListModels(pb.ListModelsRequest())
        return [model.name for model in response.models]

    async def text(self, model: str = "", **options: Any) -> str:
        return await self.client.generate("x", model=model, **options).text()

    async def refusal(self, model: str) -> str:
        with pytest.raises(CallFailedError) as caught:
            await self.text(model)
        return caught.value.server_reason


@asynccontextmanager
async def folder_server(folder: Path, **settings: Any) -> AsyncIterator[Rig]:
    before = threading.active_count()
    given = {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0", "drain_grace_s": 5.0, **settings}
    async with serving(Settings(models=folder, **given)) as server:
        target = f"127.0.0.1:{server.port}"
        async with (
            Client(target, resume_window_s=0, max_retries=0) as client,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.admin_port or server.port}") as channel,
        ):
            yield Rig(server, client, AdminServiceStub(channel), target)
            for pool in server.models:
                await pool.wait_idle()
                pool.check_integrity()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("model-")], names
    assert before <= threading.active_count() + 64  # grpc's own come and go


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    script(tmp_path, "alpha", "I am alpha.")
    script(tmp_path, "bravo", "I am bravo.")
    return tmp_path


async def begun(rig: Rig, model: str, **options: Any) -> Generation:
    stream = rig.client.generate("x", model=model, **options)
    await anext(stream)
    return stream


def reason(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    failed = call_failed(error)
    return failed.code, failed.server_reason


async def test_each_model_of_the_folder_answers_under_its_name(folder: Path) -> None:
    async with folder_server(folder, default_model="bravo") as rig:
        assert await rig.text("alpha") == "I am alpha."
        assert await rig.text("bravo") == await rig.text() == "I am bravo."
        assert await rig.refusal("charlie") == "MODEL_NOT_FOUND"
        response = await rig.client.stub.ListModels(pb.ListModelsRequest())
        assert [model.name for model in response.models] == ["bravo", "alpha"], "the default comes first"
        for model in response.models:
            assert (model.engine, model.has_chat_template) == ("scripted", True)
            assert model.context_length > 0
        assert len({model.revision for model in response.models}) == 2


async def test_only_the_models_to_load_are_served_at_first(folder: Path) -> None:
    async with folder_server(folder, load="bravo") as rig:
        assert await rig.names() == ["bravo"]
        assert await rig.states() == {"alpha": UNLOADED, "bravo": READY}
        assert await rig.refusal("alpha") == "MODEL_NOT_FOUND"
        assert (await rig.load("alpha")).state == READY
        assert await rig.text("alpha") == "I am alpha."
        assert await rig.names() == ["bravo", "alpha"]


async def test_a_model_put_into_the_folder_later_can_be_loaded(folder: Path) -> None:
    async with folder_server(folder) as rig:
        script(folder, "charlie", "I came later.")
        await rig.load("charlie")
        assert await rig.text("charlie") == "I came later."


async def test_an_unloaded_model_is_not_found_and_loaded_again_is_as_its_file_is_now(folder: Path) -> None:
    async with folder_server(folder) as rig:
        assert (await rig.unload("alpha")).model.state == UNLOADED
        assert await rig.refusal("alpha") == await rig.refusal("") == "MODEL_NOT_FOUND"
        assert await rig.names() == ["bravo"]
        script(folder, "alpha", "I am new.")
        await rig.load("alpha")
        assert await rig.text() == "I am new."
        assert (await rig.unload("alpha")).model.state == (await rig.unload("alpha")).model.state == UNLOADED


async def test_a_server_without_models_says_so_and_lives(folder: Path) -> None:
    async with folder_server(folder, load="") as rig:
        info = await rig.client.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.engine, info.limits.max_prompt_tokens) == ("", 0)
        assert await rig.names() == []
        assert await rig.refusal("") == "MODEL_NOT_FOUND"
        await rig.load("alpha")
        assert await rig.text() == "I am alpha."


async def test_unloading_lets_streams_finish_takes_no_new_ones_and_leaves_others_alone(folder: Path) -> None:
    (folder / "slow.toml").write_text(SLOW)
    async with folder_server(folder) as rig:
        stream = await begun(rig, "slow")
        unloading = asyncio.ensure_future(rig.unload("slow"))
        await until(lambda: "slow" not in rig.server.models.names)
        assert await rig.refusal("slow") == "MODEL_NOT_FOUND"
        assert (await rig.states())["slow"] == apb.MODEL_STATE_UNLOADING
        assert await rig.text("alpha") == "I am alpha."
        assert await stream.text() == LONG.strip()
        assert (await unloading).all_finished


async def test_streams_left_after_the_grace_end_with_a_status(folder: Path) -> None:
    (folder / "slow.toml").write_text(SLOW)
    async with folder_server(folder) as rig:
        stream = await begun(rig, "slow", ignore_eos=True)
        response = await rig.unload("slow", grace_ms=20)
        assert not response.all_finished
        with pytest.raises(CallFailedError) as caught:
            await stream.text()
        assert (caught.value.code, caught.value.server_reason) == ("UNAVAILABLE", "SERVER_STOPPED")
        assert await rig.text("alpha") == "I am alpha."


async def test_a_stream_of_a_model_being_unloaded_can_be_resumed_and_then_no_more(folder: Path) -> None:
    (folder / "slow.toml").write_text(SLOW)
    async with folder_server(folder) as rig, Client(rig.target, resume_window_s=30) as client:
        stream = client.generate("x", model="slow")
        start = await stream.start()
        unloading = asyncio.ensure_future(rig.unload("slow"))
        await until(lambda: "slow" not in rig.server.models.names)
        request = pb.ResumeRequest(stream_id=stream.stream_id, resume_token=start.resume_token)
        messages = [message async for message in client.stub.Resume(request)]
        assert messages[0].start.model == "slow"
        assert (await unloading).all_finished
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [message async for message in client.stub.Resume(request)]
        assert reason(caught.value) == ("NOT_FOUND", "STREAM_EXPIRED")
        await stream.close()


async def test_streams_are_resumed_and_cancelled_whatever_their_model(folder: Path) -> None:
    (folder / "slow.toml").write_text(SLOW)
    async with folder_server(folder) as rig:
        first = await begun(rig, "slow", request_id="mine")
        with pytest.raises(CallFailedError) as caught:
            await rig.text("alpha", request_id="mine")
        assert caught.value.server_reason == "REQUEST_ID_IN_USE", "ids are unique over all models"
        assert await rig.client.cancel(request_id="mine") == "ABORTED"
        await first.text()
        assert first.finish_reason == "CANCELLED"
        request = pb.ResumeRequest(stream_id=first.stream_id, resume_token=b"x" * 16)
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            _ = [message async for message in rig.client.stub.Resume(request)]
        assert reason(missing.value) == ("NOT_FOUND", "STREAM_EXPIRED")
        request.stream_id = "zzzzz-1"
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            _ = [message async for message in rig.client.stub.Resume(request)]
        assert reason(missing.value) == ("NOT_FOUND", "STREAM_OF_ANOTHER_INSTANCE")


async def test_a_model_that_cannot_be_loaded_says_why_and_disturbs_nobody(folder: Path) -> None:
    (folder / "slow.toml").write_text(SLOW)
    async with folder_server(folder) as rig:
        stream = await begun(rig, "slow")
        (folder / "broken.gguf").write_bytes(b"GGUF and then nothing")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.load("broken")
        assert reason(caught.value) == ("FAILED_PRECONDITION", "MODEL_LOAD_FAILED")
        assert "broken.gguf" in (caught.value.details() or "")
        assert (await rig.states())["broken"] == FAILED
        assert await stream.text() == LONG.strip()
        (folder / "broken.gguf").unlink()
        assert "broken" not in await rig.states()


async def test_a_model_that_cannot_be_loaded_at_the_start_ends_it(folder: Path) -> None:
    (folder / "broken.gguf").write_bytes(b"GGUF and then nothing")
    with pytest.raises(ModelLoadError, match="'broken' cannot be loaded"):
        async with folder_server(folder):
            pass
    async with folder_server(folder, load="alpha") as rig:
        assert await rig.text() == "I am alpha."


async def test_two_loads_at_once_are_one(folder: Path) -> None:
    async with folder_server(folder, load="bravo") as rig:
        first, second = await asyncio.gather(rig.load("alpha"), rig.load("alpha"))
        assert first.state == second.state == READY
        assert await rig.text("alpha") == "I am alpha."


class SlowOpening:
    """Opens models as ever, one named alpha only when it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may = threading.Event()
        self.began = threading.Event()
        self.opened: list[Engine] = []
        monkeypatch.setattr(repository, "open_model", self)

    def __call__(self, settings: Settings, progress: Callable[[str, float], None]) -> Engine:
        slow = "alpha" in (settings.script_text or "")
        if slow:
            progress("compiling", 0.5)
            self.began.set()
            assert self.may.wait(30)
        engine = open_model(settings, progress)
        if slow:
            self.opened.append(engine)
        return engine


async def test_loading_shows_how_far_it_is_and_goes_on_when_who_asked_has_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = SlowOpening(monkeypatch)
    async with folder_server(folder, load="bravo") as rig:
        call = rig.admin.LoadModel(apb.LoadModelRequest(model="alpha"))
        await until(opening.began.is_set)
        call.cancel()
        model = (await rig.admin.ListRepository(apb.ListRepositoryRequest())).models[0]
        assert (model.state, model.phase, model.phase_done) == (apb.MODEL_STATE_LOADING, "compiling", 0.5)
        assert await rig.text("bravo") == "I am bravo.", "others are served meanwhile"
        loading = [asyncio.ensure_future(rig.load("alpha")) for _ in range(2)]
        opening.may.set()
        assert [model.state for model in await asyncio.gather(*loading)] == [READY, READY]
        assert len(opening.opened) == 1
        assert await rig.text("alpha") == "I am alpha."


async def test_unloading_waits_for_the_end_of_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opening = SlowOpening(monkeypatch)
    async with folder_server(folder, load="bravo") as rig:
        loading = asyncio.ensure_future(rig.load("alpha"))
        await until(opening.began.is_set)
        unloading = asyncio.ensure_future(rig.unload("alpha"))
        opening.may.set()
        assert (await loading).state == READY
        assert (await unloading).model.state == UNLOADED


async def test_a_server_stops_while_a_model_is_loaded_and_the_engine_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = SlowOpening(monkeypatch)
    closed = threading.Event()
    monkeypatch.setattr(ScriptedEngine, "close", lambda _: closed.set())
    server = serving(Settings(models=folder, load="", listen="127.0.0.1:0", admin_listen="127.0.0.1:0"))
    async with server as running, grpc.aio.insecure_channel(f"127.0.0.1:{running.admin_port}") as channel:
        stub: Any = AdminServiceStub(channel)
        call = stub.LoadModel(apb.LoadModelRequest(model="alpha"))
        await until(opening.began.is_set)
    call.cancel()
    assert not closed.is_set(), "the server did not wait for it"
    opening.may.set()
    await until(closed.is_set)


async def test_models_come_and_go_under_traffic_and_every_request_ends_cleanly(folder: Path) -> None:
    texts = {"alpha": "I am alpha.", "bravo": "I am bravo."}
    async with folder_server(folder) as rig:
        done, gone = False, "alpha: MODEL_NOT_FOUND"
        outcomes: dict[str, int] = {}

        async def ask(model: str) -> None:
            while not done:
                try:
                    assert await rig.text(model) == texts[model]
                    outcome = model
                except CallFailedError as error:
                    outcome = f"{model}: {error.server_reason}"
                outcomes[outcome] = outcomes.get(outcome, 0) + 1

        async with asyncio.TaskGroup() as group:
            for model in [*texts, *texts]:
                group.create_task(ask(model))
            for _ in range(10):
                assert (await rig.unload("alpha")).all_finished
                seen = outcomes.get(gone, 0)
                await until(lambda seen=seen: outcomes.get(gone, 0) > seen)  # type: ignore[misc]
                await rig.load("alpha")
                seen = outcomes.get("alpha", 0)
                await until(lambda seen=seen: outcomes.get("alpha", 0) > seen)  # type: ignore[misc]
            done = True
        assert set(outcomes) == {"alpha", "bravo", gone}


async def test_an_unloaded_model_leaves_nothing_behind(folder: Path) -> None:
    async with folder_server(folder) as rig:
        await rig.text("alpha")
        pool = weakref.ref(rig.server.models.find("alpha")[1])
        await rig.unload("alpha")
        gc.collect()
        assert pool() is None


async def test_health_knows_each_model_by_its_name(folder: Path) -> None:
    async with folder_server(folder) as rig, grpc.aio.insecure_channel(rig.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def check(service: str) -> int:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            status: int = answer.status
            return status

        serving_now = health_pb2.HealthCheckResponse.SERVING
        assert await check("") == await check(f"{MODEL_PREFIX}alpha") == serving_now
        await rig.unload("alpha")
        assert await check("") == await check(f"{MODEL_PREFIX}bravo") == serving_now
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(f"{MODEL_PREFIX}alpha")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await rig.unload("bravo")
        assert await check("") == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_metrics_have_a_label_for_each_model_and_no_gauges_of_unloaded_ones(folder: Path) -> None:
    async with folder_server(folder, metrics_listen="127.0.0.1:0") as rig:
        await rig.text("alpha")
        await rig.unload("alpha")
        assert rig.server.metrics_port is not None
        _, body = await http(rig.server.metrics_port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
        assert any('model="alpha"' in line and "streamsrv_requests_total" in line for line in lines)
        gauges = [line for line in lines if line.startswith("streamsrv_workers_ready")]
        assert gauges == ['streamsrv_workers_ready{model="bravo"} 1.0']


# ---------------------------------------------------------------------------------------------------------
# Who may


async def test_nothing_can_be_loaded_or_unloaded_unless_it_is_asked_for(folder: Path) -> None:
    async with folder_server(folder, admin_listen=None) as rig:
        assert rig.server.admin_port is None
        for call in (rig.load("alpha"), rig.unload("alpha"), rig.states()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await rig.text("alpha") == "I am alpha."


async def test_the_address_for_requests_never_loads_or_unloads(folder: Path) -> None:
    async with folder_server(folder) as rig, grpc.aio.insecure_channel(rig.target) as channel:
        stub: Any = AdminServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.UnloadModel(apb.UnloadModelRequest(model="alpha"))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_key_for_requests_is_none_for_administration(folder: Path) -> None:
    caller, admin = new_key(), new_key()
    for name, key in (("caller", caller), ("admin", admin)):
        (folder / f"{name}.keys").write_text(key_line(name, key) + "\n")
    keys = {"api_keys": folder / "caller.keys", "admin_keys": folder / "admin.keys"}
    async with folder_server(folder, **keys) as rig:
        request = apb.UnloadModelRequest(model="alpha")
        for metadata in (None, (("authorization", f"Bearer {caller}"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.admin.UnloadModel(request, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        response = await rig.admin.UnloadModel(request, metadata=(("authorization", f"Bearer {admin}"),))
        assert response.model.state == UNLOADED


async def test_bad_admin_calls_are_refused_with_the_field(folder: Path) -> None:
    async with folder_server(folder) as rig:
        for call, code in (
            (rig.load(""), "INVALID_ARGUMENT"),
            (rig.unload(""), "INVALID_ARGUMENT"),
            (rig.unload("alpha", grace_ms=3_600_001), "INVALID_ARGUMENT"),
            (rig.load("nope"), "NOT_FOUND"),
            (rig.unload("nope"), "NOT_FOUND"),
            (rig.load("../alpha"), "NOT_FOUND"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code().name == code
        assert await rig.text("alpha") == "I am alpha."


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"admin_listen": "0.0.0.0:1"}, "is reachable from other machines"),
        ({"admin_keys": "keys"}, "--admin-keys is given without --admin-listen"),
        ({"model": "demo"}, "--models and --model exclude each other"),
        ({"model_name": "x"}, "--models and --model-name exclude each other"),
        ({"models": None, "admin_listen": "127.0.0.1:1"}, "--admin-listen is given without --models"),
        ({"models": None, "load": "x"}, "--load is given without --models"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"models": "folder", **flags})
    assert said in str(caught.value)


# ---------------------------------------------------------------------------------------------------------
# Engines that compute


async def test_a_model_whose_cache_does_not_fit_is_refused_and_gives_back_what_it_took(
    folder: Path, tmp_path: Path, tiny_models: dict[str, TinyPaths]
) -> None:
    pytest.importorskip("openvino")
    path = next(iter(tiny_models.values())).gguf
    (folder / "huge.toml").write_text(f'model = "{path}"\nkv_cache_gib = 100000\nengine = "openvino"\n')
    async with folder_server(folder, load="alpha", cache_dir=tmp_path / "cache") as rig:
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.load("huge")
            assert "a cache of 100000 GiB was asked for" in (caught.value.details() or "")
        assert await rig.states() == {"alpha": READY, "bravo": UNLOADED, "huge": FAILED}
        (folder / "huge.toml").write_text(f'model = "{path}"\nkv_cache_gib = 0.01\nengine = "openvino"\n')
        assert (await rig.load("huge")).state == READY


async def test_real_models_are_loaded_and_unloaded_and_give_their_memory_back(
    tmp_path: Path, tiny_models: dict[str, TinyPaths]
) -> None:
    pytest.importorskip("openvino")
    paths = list(tiny_models.values())[:2]
    for name, tiny_path in zip(("one", "two"), paths, strict=True):
        (tmp_path / f"{name}.toml").write_text(
            f'model = "{tiny_path.gguf}"\nkv_cache_gib = 0.1\nengine = "openvino"\n'
        )
    settings = {"cache_dir": tmp_path / "cache", "max_context": 64, "load": "one"}
    async with folder_server(tmp_path, **settings) as rig:
        alone = await rig.text("one", max_tokens=8, temperature=0)
        await rig.load("two")
        together = await asyncio.gather(
            *(rig.text(name, max_tokens=8, temperature=0, ignore_eos=True) for name in ("one", "two") * 3)
        )
        assert together[0] == together[2] == together[4]
        assert together[1] == together[3] == together[5]
        assert together[0].startswith(alone)
        sizes = []
        for _ in range(6):
            await rig.unload("two")
            gc.collect()
            sizes.append(resident_bytes())
            await rig.load("two")
            assert await rig.text("two", max_tokens=8, temperature=0, ignore_eos=True) == together[1]
        assert max(sizes[3:]) - sizes[2] < 50 << 20, "half of one cache"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
