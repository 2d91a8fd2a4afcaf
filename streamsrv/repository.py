"""Loads and unloads the models of a folder, each in a task of its own."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from engines.api import Engine, StreamsrvError
from streamsrv.config import Settings
from streamsrv.engine_thread import EngineThread
from streamsrv.errors import ModelLoadError, ModelNotFoundError
from streamsrv.log_format import fields
from streamsrv.metrics import Metrics
from streamsrv.models_folder import ModelEntry, ModelsFolder
from streamsrv.opening import make_pool, open_model
from streamsrv.pool import WorkerPool
from streamsrv.served_models import ServedModels

log = logging.getLogger(__name__)

T = TypeVar("T")

# How long the readers of streams that were ended may take to hear of it.
_LAST_WORDS_S = 1.0
# How long an engine's thread may take to end after it has closed the engine.
_JOIN_S = 5.0


class ModelState(Enum):
    """How a model of the folder stands."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model of the folder at one moment."""

    name: str
    path: Path
    state: ModelState
    error: str = ""
    """Why it is FAILED."""
    phase: str = ""
    """What loading does."""
    phase_done: float = 0.0
    """From 0 to 1."""
    num_streams: int = 0
    """Streams that can be read."""


@dataclass(eq=False, slots=True)
class _Slot:
    """A model that was loaded, or was to be."""

    entry: ModelEntry
    state: ModelState = ModelState.UNLOADED
    error: str = ""
    progress: tuple[str, float] = ("", 0.0)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by what loads or unloads it."""
    pool: WorkerPool | None = None
    host: asyncio.Task[None] | None = None
    to_end: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def status(self) -> ModelStatus:
        phase, done = self.progress
        num_streams = self.pool.num_streams if self.pool else 0
        return ModelStatus(self.entry.name, self.entry.path, self.state, self.error, phase, done, num_streams)


class Repository:
    """The models of a folder. What one of them does, or what becomes of it, does not touch the others.

    Each loaded model has an engine, workers and a task of its own. Loading and unloading go on when the
    caller who asked for it goes away. Models are loaded one after the other, because each takes its share of
    the memory that it finds.
    """

    def __init__(self, folder: ModelsFolder, metrics: Metrics, on_state: Callable[[], None]) -> None:
        """`on_state` is called whenever a model, or a worker of it, has changed its state.

        Raises:
            SettingsError: the folder is unusable, or a model named in the settings is not in it.

        """
        self._folder = folder
        self._metrics = metrics
        self._on_state = on_state
        self._wanted = folder.wanted
        self._slots: dict[str, _Slot] = {}
        self._group: asyncio.TaskGroup | None = None
        self._operations: set[asyncio.Task[Any]] = set()
        self._one_load = asyncio.Lock()
        self.served = ServedModels(folder.default)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load what the settings want; inside, models can be loaded and unloaded. Leaving frees them all.

        Raises:
            ModelLoadError: one of them cannot be loaded.

        """
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                try:
                    for name in self._wanted:
                        await self.load(name)
                    yield
                finally:
                    self._group = None
                    for task in self._operations:
                        task.cancel()
                    for slot in self._slots.values():
                        slot.to_end.set()
                        if slot.state is ModelState.LOADING and slot.host is not None:
                            slot.host.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def statuses(self) -> list[ModelStatus]:
        """Tell how each model stands: those in the folder now, and those loaded whose file has gone.

        Raises:
            SettingsError: the folder is unusable.

        """
        statuses = {name: _Slot(entry).status for name, entry in self._folder.entries().items()}
        for name, slot in self._slots.items():
            if name in statuses or slot.state not in (ModelState.UNLOADED, ModelState.FAILED):
                statuses[name] = slot.status
        return [statuses[name] for name in sorted(statuses)]

    async def load(self, name: str) -> ModelStatus:
        """Serve a model; returns when it takes requests. One that is served already is left alone.

        Raises:
            ModelNotFoundError: it is not in the folder.
            ModelLoadError: it cannot be loaded.
            SettingsError: the folder is unusable.

        """
        entries = self._folder.entries()
        slot = self._slots.get(name)
        if name not in entries and (slot is None or slot.state is not ModelState.READY):
            raise ModelNotFoundError(name, tuple(entries), names="in the folder")
        if slot is None:
            slot = self._slots[name] = _Slot(entries[name])
        return await self._go_on(self._load(slot, entries.get(name, slot.entry)))

    async def unload(self, name: str, grace_s: float) -> tuple[ModelStatus, bool]:
        """Take no more requests for a model, let its streams finish, free it; whether all of them did.

        Those that are left after `grace_s` seconds end with StoppedError. A model that is not served is left
        alone.

        Raises:
            ModelNotFoundError: it is not in the folder.
            SettingsError: the folder is unusable.

        """
        slot = self._slots.get(name)
        if slot is None:
            entries = self._folder.entries()
            if name not in entries:
                raise ModelNotFoundError(name, tuple(entries), names="in the folder")
            return _Slot(entries[name]).status, True
        return await self._go_on(self._unload(slot, grace_s))

    async def _go_on(self, operation: Coroutine[Any, Any, T]) -> T:
        """Run what outlives its caller; what it raises is the caller's, and never ends the group."""
        if self._group is None:
            operation.close()
            raise ModelLoadError("", "the server is stopping")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                result = await operation
            except asyncio.CancelledError:
                future.cancel()
                raise
            except Exception as error:  # whoever waits gets it
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

        task = self._group.create_task(run())
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)
        return await future

    async def _load(self, slot: _Slot, entry: ModelEntry) -> ModelStatus:
        async with slot.lock:
            if slot.state is ModelState.READY:
                return slot.status
            slot.entry, slot.error, slot.progress = entry, "", ("", 0.0)
            slot.to_end = asyncio.Event()
            self._move(slot, ModelState.LOADING)
            async with self._one_load:
                assert self._group is not None
                ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                slot.host = self._group.create_task(self._host(slot, ready))
                # The host never raises; cancelled before it began, it says nothing.
                await asyncio.wait([slot.host, ready], return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                await asyncio.wait([slot.host])
                raise ModelLoadError(entry.name, slot.error or "loading was ended")
            return slot.status

    async def _unload(self, slot: _Slot, grace_s: float) -> tuple[ModelStatus, bool]:
        async with slot.lock:
            if slot.state is not ModelState.READY:
                return slot.status, True
            assert slot.pool is not None
            assert slot.host is not None
            self.served.retire(slot.entry.name)
            self._move(slot, ModelState.UNLOADING)
            finished = await slot.pool.drain(grace_s)
            if not finished:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_WORDS_S):
                        await slot.pool.wait_idle()
            slot.to_end.set()
            await asyncio.wait([slot.host])
            return slot.status, finished

    async def _host(self, slot: _Slot, ready: asyncio.Future[None]) -> None:
        """Own a model from its engine's making to its end; `ready` is set when it is served."""
        name, metrics = slot.entry.name, self._metrics.model(slot.entry.name)
        ended = ModelState.UNLOADED
        try:
            settings = self._folder.settings(slot.entry, self._num_sharing(slot))
            async with _opened(name, settings, slot) as engine:
                # On another thread: making a tokenizer of 49,152 tokens held the others' streams for 0.2 s.
                pool = await asyncio.to_thread(
                    make_pool,
                    settings,
                    engine,
                    instance_id=self.served.next_instance_id(),
                    on_state=self._on_state,
                    observer=metrics,
                )
                async with pool.running():
                    slot.pool, metrics.state = pool, pool.state
                    self.served.add(name, pool)
                    self._move(slot, ModelState.READY)
                    if not ready.done():
                        ready.set_result(None)
                    await slot.to_end.wait()
        except asyncio.CancelledError:
            raise
        except StreamsrvError as error:
            ended, slot.error = ModelState.FAILED, str(error)
        except Exception as error:
            log.exception("a fault of ours ended a model", extra=fields({"model": name}))
            ended, slot.error = ModelState.FAILED, f"a fault of the server ({type(error).__name__})"
        finally:
            slot.pool = metrics.state = pool = None  # type: ignore[assignment]
            self.served.remove(name)
            self._move(slot, ended)

    def _num_sharing(self, slot: _Slot) -> int:
        """Among how many models memory is divided: those served with this one, and those still wanted."""
        served = {name for name, _ in self.served.every()}
        return len(served | set(self._wanted) | {slot.entry.name})

    def _move(self, slot: _Slot, state: ModelState) -> None:
        slot.state = state
        extra = {"model": slot.entry.name, "state": state.value}
        if state is ModelState.FAILED:
            log.error("model: %s", slot.error, extra=fields(extra))
        else:
            log.info("model", extra=fields(extra))
        self._on_state()


@asynccontextmanager
async def _opened(name: str, settings: Settings, slot: _Slot) -> AsyncIterator[Engine]:
    """Make an engine on a thread of its own, and close it there.

    Nothing interrupts the making of one. If this is cancelled meanwhile, the thread is left to itself, and
    closes what it has made.
    """
    thread, given_up = EngineThread(f"model-{name}"), threading.Event()

    def progress(phase: str, done: float) -> None:
        slot.progress = (phase, done)

    def make() -> Engine:
        engine = open_model(settings, progress)
        if given_up.is_set():
            engine.close()
        return engine

    try:
        try:
            engine = await thread.call(make)
        except asyncio.CancelledError:
            given_up.set()
            raise
        slot.progress = ("", 0.0)
        try:
            yield engine
        finally:
            await thread.call(engine.close)
    finally:
        thread.close()
        if not given_up.is_set():
            await asyncio.to_thread(thread.join, _JOIN_S)
