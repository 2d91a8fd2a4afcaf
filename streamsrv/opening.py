"""From settings to a model that can be served: its engine, then its workers."""

from collections.abc import Callable

from engines.api import CheckpointError, Engine
from engines.demo_model import model_path
from engines.registry import open_engine
from engines.scripted import DEFAULT_SCRIPT, ScriptedEngine
from streamsrv.config import Settings
from streamsrv.observer import PoolObserver
from streamsrv.pool import PoolLimits, WorkerPool
from streamsrv.tokenizer import Tokenizer


def open_model(settings: Settings, progress: Callable[[str, float], None] | None = None) -> Engine:
    """Make the engine that the settings name; takes seconds.

    Raises:
        CheckpointError: the model's files are unusable.
        EngineError: the engine is unknown, not installed, or cannot run the model.
    """
    if settings.engine == ScriptedEngine.name:
        return ScriptedEngine(settings.script_text or DEFAULT_SCRIPT, step_s=settings.script_step_ms / 1000)
    return open_engine(settings.engine, model_path(settings.model), settings.engine_options, progress)


def make_pool(
    settings: Settings,
    engine: Engine,
    *,
    instance_id: str,
    on_state: Callable[[], None],
    observer: PoolObserver,
) -> WorkerPool:
    """Make the pool that serves an engine as the settings say; its workers are not running yet.

    `instance_id` begins its stream ids; `on_state` is called whenever a worker's state has changed.

    Raises:
        CheckpointError: the model's tokenizer is not its own.
    """
    return WorkerPool(
        engine,
        open_tokenizer(engine),
        PoolLimits(
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            max_waiting_tokens=settings.max_waiting_tokens,
            max_waiting_per_caller=settings.max_waiting_per_caller,
            max_resume_window_s=settings.max_resume_window_s,
            log_memory_bytes=settings.log_memory_mib << 20,
            stuck_after_s=settings.stuck_after_s,
            max_step_tokens=settings.max_step_tokens,
            max_context=settings.max_context or engine.model.spec.context_length,
            prefix_cache=settings.prefix_cache,
            prompt_lookup=settings.prompt_lookup,
        ),
        num_workers=settings.workers,
        instance_id=instance_id,
        on_state=on_state,
        observer=observer,
    )


def open_tokenizer(engine: Engine) -> Tokenizer:
    """Make the tokenizer of an engine's model.

    Raises:
        CheckpointError: it has more tokens than the model.
    """
    model = engine.model
    tokenizer = Tokenizer(model.vocabulary)
    if tokenizer.vocab_size > model.spec.vocab_size:
        raise CheckpointError(
            f"{model.path}: its tokenizer has {tokenizer.vocab_size} tokens, its embedding table only "
            f"{model.spec.vocab_size}; the two are not of the same model"
        )
    return tokenizer
