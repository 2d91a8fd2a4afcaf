"""Composition root: starts everything, and unwinding is the shutdown."""

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engines.api import Engine
from streamsrv import __version__
from streamsrv.admin import ADMIN_SERVICE_NAME, AdminService
from streamsrv.api_keys import ApiKeys, parse_api_keys
from streamsrv.auth import ApiKeyInterceptor
from streamsrv.call import CallObserver
from streamsrv.call_log import CallLog
from streamsrv.config import Address, Settings
from streamsrv.errors import SettingsError
from streamsrv.health import HealthService
from streamsrv.malformed import MalformedRequests
from streamsrv.metrics import Metrics
from streamsrv.metrics_endpoint import metrics_endpoint
from streamsrv.models_folder import ModelsFolder
from streamsrv.opening import make_pool
from streamsrv.pool import WorkerPool
from streamsrv.repository import Repository
from streamsrv.request import RequestLimits
from streamsrv.served_models import ServedModels
from streamsrv.service import InferenceService
from streamsrv.tls import KeyPair, server_credentials
from streamsrv.tracing import tracing
from streamsrv.v1 import inference_pb2
from streamsrv.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from streamsrv.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from streamsrv.watched_files import WatchedFiles

log = logging.getLogger(__name__)

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
MODEL_PREFIX = f"{SERVICE_NAME}/"
"""Before a model's name it is the name that health checks know it by."""
# How long the transport gets to send what is written already, after the streams have ended.
_FLUSH_S = 1.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that takes calls."""

    models: ServedModels
    port: int
    metrics_port: int | None = None
    """Where Prometheus is answered; None for nowhere."""
    admin_port: int | None = None
    """Where models are loaded and unloaded; None for nowhere."""

    @property
    def pool(self) -> WorkerPool:
        """The default model's."""
        return self.models.find("")[1]


def open_api_keys(settings: Settings) -> WatchedFiles[ApiKeys] | None:
    """Read the file of API keys; None if there is none, and everyone is let in.

    Raises:
        SettingsError: it cannot be read, or a line is wrong.
    """
    path = settings.api_keys
    if path is None:
        return None
    return WatchedFiles([path], partial(parse_api_keys, path=path))


def open_tls(settings: Settings) -> grpc.ServerCredentials | None:
    """Read the certificates; None if there are none, and connections are in plain text.

    Raises:
        SettingsError: a file is missing, unreadable or not PEM, or the key is not the certificate's.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return server_credentials(KeyPair(settings.tls_cert, settings.tls_key), settings.tls_client_ca)


def check_files(settings: Settings) -> None:
    """Read the files of keys and certificates, to find out what is wrong with them before long work begins.

    Raises:
        SettingsError: one of them cannot be used.
    """
    open_api_keys(settings)
    open_tls(settings)


@asynccontextmanager
async def serving(settings: Settings, engine: Engine | None = None) -> AsyncIterator[RunningServer]:
    """Serve an engine, or the models of a folder; inside, the port is open and health says SERVING.

    Leaving drains. `engine` is the caller's to close; with `settings.models` there is none.

    Raises:
        SettingsError: an address cannot be listened on, or a file with keys or certificates is unusable.
        ModelLoadError: a model of the folder cannot be loaded.
        StreamsrvError: a worker cannot start.
    """
    assert (engine is None) == (settings.models is not None)
    keys, credentials = open_api_keys(settings), open_tls(settings)
    if keys is not None and not len(keys.current()):
        log.warning("%s has no keys: every call is refused until it has one", settings.api_keys)
    if credentials is None and not settings.address.is_loopback:
        log.warning("%s is open in plain text: prompts and outputs can be read on the way", settings.listen)
    async with AsyncExitStack() as stack:
        metrics, repository = Metrics(__version__), None
        if engine is None:
            folder = ModelsFolder(settings)
            num_models = max(1, len(folder.entries()))
            repository = Repository(folder, metrics, lambda: show_health())
            models = repository.served
        else:
            models, num_models = ServedModels(settings.model_name or engine.model.name), 1
        health = HealthService([SERVICE_NAME], prefix=MODEL_PREFIX)

        # Health follows the workers: no worker, no service.
        def show_health() -> None:
            health.set(serving=models.healthy, models={name: pool.healthy for name, pool in models.served()})

        observers: list[CallObserver] = [CallLog(), metrics]
        if settings.otlp_endpoint is not None:
            tracer = tracing(settings.otlp_endpoint, instance_id=models.instance_id, version=__version__)
            observers.append(await stack.enter_async_context(tracer))
        metrics_port = None
        if settings.metrics_address is not None:
            endpoint = metrics_endpoint(metrics.registry, settings.metrics_address)
            metrics_port = await stack.enter_async_context(endpoint)
        if repository is not None:
            await stack.enter_async_context(repository.running())
        if engine is not None:
            model_metrics = metrics.model(models.default)
            pool = make_pool(
                settings,
                engine,
                instance_id=models.next_instance_id(),
                on_state=show_health,
                observer=model_metrics,
            )
            model_metrics.state = pool.state
            await stack.enter_async_context(pool.running())
            models.add(models.default, pool)
        interceptors: list[grpc.aio.ServerInterceptor] = [MalformedRequests(SERVICE_NAME, metrics.refused)]
        if keys is not None:
            # First, so that a call that is not let in does no work.
            interceptors.insert(0, ApiKeyInterceptor(keys, metrics.refused))
        server = grpc.aio.server(interceptors=interceptors, options=grpc_options(settings, num_models))
        service = InferenceService(
            models,
            max_message_bytes=settings.max_message_mib << 20,
            stall_limit_s=settings.stall_limit_s,
            limits=RequestLimits(
                max_stop_strings=settings.max_stop_strings,
                max_stop_bytes=settings.max_stop_bytes,
                max_stop_token_ids=settings.max_stop_token_ids,
                max_outputs=settings.max_outputs,
                max_top_logprobs=settings.max_top_logprobs,
                max_logit_biases=settings.max_logit_biases,
                max_constraint_bytes=settings.max_constraint_bytes,
            ),
            min_chunk_interval_s=settings.min_chunk_interval_ms / 1000,
            observers=observers,
            chunk_totals=metrics.chunks,
            log_prompts=settings.log_prompts,
        )
        add_InferenceServiceServicer_to_server(service, server)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        port = _bind(server, settings.address, "--listen", credentials)
        await server.start()
        stack.push_async_callback(server.stop, _FLUSH_S)
        stack.callback(health.close)
        show_health()
        admin_port = None
        if repository is not None and settings.admin_address is not None:
            admin_port = await stack.enter_async_context(admin_endpoint(settings, repository, metrics))
        try:
            yield RunningServer(models, port, metrics_port, admin_port)
        finally:
            health.set(serving=False)
            if not await models.drain(settings.drain_grace_s):
                log.warning(
                    "the grace of %g s was over before every stream had ended", settings.drain_grace_s
                )


@asynccontextmanager
async def admin_endpoint(settings: Settings, repository: Repository, metrics: Metrics) -> AsyncIterator[int]:
    """Answer AdminService where the settings say; gives the port.

    Raises:
        SettingsError: the address cannot be listened on, or the file with keys is unusable.
    """
    assert settings.admin_address is not None
    interceptors: list[grpc.aio.ServerInterceptor] = [MalformedRequests(ADMIN_SERVICE_NAME, metrics.refused)]
    if settings.admin_keys is not None:
        keys = WatchedFiles([settings.admin_keys], partial(parse_api_keys, path=settings.admin_keys))
        interceptors.insert(0, ApiKeyInterceptor(keys, metrics.refused))
    server = grpc.aio.server(interceptors=interceptors, options=[("grpc.so_reuseport", 0)])
    add_AdminServiceServicer_to_server(AdminService(repository, settings.drain_grace_s), server)
    reflection.enable_server_reflection((ADMIN_SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = _bind(server, settings.admin_address, "--admin-listen", None)
    await server.start()
    try:
        yield port
    finally:
        # Not to wait for the calls: what they began is ended by the repository.
        await server.stop(None)


async def serve(settings: Settings, engine: Engine | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then let live streams finish; a second signal ends at once."""
    # The worker's thread waits for the interpreter while the loop's sends: less of the default 5 ms at a time
    # leaves the engine idle for 1.3 ms a step instead of 2.1 ms, with 32 streams on 2 processors.
    sys.setswitchinterval(1e-4)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    main = asyncio.current_task()
    assert main is not None

    def on_signal() -> None:
        if stop.is_set():
            main.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with serving(settings, engine) as running:
        print(f"listening on {replace(settings.address, port=running.port)}", flush=True)
        if settings.metrics_address is not None and running.metrics_port is not None:
            print(f"metrics on {replace(settings.metrics_address, port=running.metrics_port)}", flush=True)
        if settings.admin_address is not None and running.admin_port is not None:
            print(f"admin on {replace(settings.admin_address, port=running.admin_port)}", flush=True)
        await stop.wait()
        log.info("stopping: %d streams to finish", running.models.num_unfinished)


def grpc_options(settings: Settings, num_models: int = 1) -> list[tuple[str, int]]:
    """List the options that the gRPC server is made with; grpc ignores names that it does not know."""
    num_streams = settings.max_streams_per_connection or num_models * settings.streams_per_connection
    return [
        ("grpc.max_receive_message_length", settings.max_message_mib << 20),
        ("grpc.max_concurrent_streams", num_streams),
        # It would reset calls that a client sent before it knew that bound, or as others ended.
        ("grpc.http.overload_protection", 0),
        ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share its calls
        ("grpc.keepalive_time_ms", 60_000),  # a peer that died is noticed after this and the next
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # clients may ping idle connections
    ]


def _bind(
    server: grpc.aio.Server, address: Address, flag: str, credentials: grpc.ServerCredentials | None
) -> int:
    try:
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise SettingsError(
            f"cannot listen on {address}: the port is in use or the address is not this machine's; "
            f"choose another with {flag}, or port 0 for a free one"
        )
    return port
