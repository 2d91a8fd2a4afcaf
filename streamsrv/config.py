"""The server's settings: one frozen object, composed once.

A flag wins over a `STREAMSRV_*` variable, that over the TOML file, that over the default.
"""

import ipaddress
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from engines.options import CacheType, EngineOptions, Precision, WeightFormat
from streamsrv.errors import SettingsError
from streamsrv.log_format import LogFormat

ENV_PREFIX = "STREAMSRV_"
CONFIG_VARIABLE = "STREAMSRV_CONFIG"
"""Names the TOML file, as the flag --config does."""
CLIENT_VARIABLE = "STREAMSRV_SERVER"
"""Names the server for commands that call one, as their flag --server does."""
API_KEY_VARIABLE = "STREAMSRV_API_KEY"
"""Holds the API key for commands that call a server."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port to listen on or to call."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, name: str) -> "Address":
        """Read HOST:PORT, with an IPv6 host in brackets.

        Raises:
            SettingsError: it is not of that form; `name` is mentioned.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise SettingsError(
                f"{name} is {text!r}; it must be HOST:PORT with a port from 0 to 65535, "
                "such as 127.0.0.1:50051 or [::1]:50051"
            )
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Mode(Enum):
    """What the settings that trade one for the other lean to, where they are not given."""

    BALANCED = "balanced"
    LATENCY = "latency"
    """The next token of each of few streams."""
    THROUGHPUT = "throughput"
    """The tokens of all streams together."""


# What a mode sets, by field; BALANCED is the fields' own defaults.
MODE_SETTINGS: Mapping[Mode, Mapping[str, int]] = {
    Mode.BALANCED: {},
    Mode.LATENCY: {"max_running": 8, "max_step_tokens": 128, "min_chunk_interval_ms": 0},
    Mode.THROUGHPUT: {
        "max_running": 128,
        "max_step_tokens": 512,
        "min_chunk_interval_ms": 50,
        "activation_group": 64,
    },
}


class Settings(BaseSettings):
    """Everything that can be set. The description of a field is its help text."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", protected_namespaces=(), validate_default=True
    )

    model: str = Field("demo", description="a GGUF file, a Hugging Face folder, or 'demo'")
    model_name: str | None = Field(
        None, min_length=1, description="what requests call the model; default: its file's or folder's name"
    )
    models: Path | None = Field(
        None,
        description="folder to serve in place of one model: each GGUF file, Hugging Face folder or NAME.toml "
        "with settings in it is a model",
    )
    load: str | None = Field(
        None,
        description="models of the folder to load at the start, separated by commas, or '' for none; "
        "default: all",
    )
    default_model: str | None = Field(
        None,
        min_length=1,
        description="model of requests that name none, with --models; default: the first by name of those "
        "loaded at the start",
    )
    memory_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="part of the memory at hand that a model's caches may count on; default: with --models "
        "an equal share for each model, else all",
    )
    engine: str = Field(
        "auto",
        description="what computes: auto (the best for this machine), openvino or onnxruntime (on a CPU), "
        "tensorrt or tensorrt_rtx (on an NVIDIA GPU), or scripted",
    )
    mode: Mode = Field(
        Mode.BALANCED,
        description="latency or throughput: sets max-running, max-step-tokens, min-chunk-interval-ms, "
        "activation-group, and for latency on onnxruntime int4 weights, where they are not given",
    )
    listen: str = Field("127.0.0.1:50051", description="HOST:PORT; port 0 takes a free one")
    allow_plaintext: bool = Field(
        False,
        description="allow listening beyond loopback without TLS: whoever is on the way can read and call",
    )
    tls_cert: Path | None = Field(
        None, description="PEM file with the server's certificate; with --tls-key it turns TLS on"
    )
    tls_key: Path | None = Field(None, description="PEM file with the certificate's private key")
    tls_client_ca: Path | None = Field(
        None, description="PEM file with authorities: a client must show a certificate of one of them"
    )
    api_keys: Path | None = Field(
        None, description="file with the keys that are let in, made by 'streamsrv keys new NAME'"
    )
    admin_listen: str | None = Field(
        None,
        description="HOST:PORT of this machine alone for loading and unloading models, with --models; "
        "default: none",
    )
    admin_keys: Path | None = Field(
        None, description="file with the keys that are let in there; default: whoever is on this machine"
    )
    metrics_listen: str | None = Field(
        None, description="HOST:PORT for Prometheus metrics over plain HTTP; default: none"
    )
    otlp_endpoint: str | None = Field(
        None, description="URL that traces are sent to (OTLP over gRPC), such as http://127.0.0.1:4317"
    )
    workers: int = Field(1, ge=1, le=64, description="workers, each with a context and a cache of its own")
    max_running: int = Field(64, ge=1, le=4096, description="outputs computed at the same time, per worker")
    max_waiting: int = Field(256, ge=0, description="requests that may wait behind them")
    max_waiting_tokens: int = Field(
        1_000_000, ge=1, description="prompt tokens that may wait behind them; one request always may"
    )
    max_waiting_per_caller: int = Field(
        128, ge=1, description="requests of one caller that may wait: an identity, else an address"
    )
    max_step_tokens: int = Field(
        320,
        ge=1,
        description="tokens computed in one step; more hold running streams up for longer",
    )
    prefix_cache: bool = Field(
        True, description="reuse what was computed for the same first tokens of another request"
    )
    prompt_lookup: bool = Field(
        True,
        description="guess tokens by what was said before, and verify several at once, while few outputs run",
    )
    min_chunk_interval_ms: int = Field(
        0,
        ge=0,
        le=10_000,
        description="least time between two messages of a stream, for requests that do not say; "
        "what comes in between is sent together",
    )
    max_context: int | None = Field(
        None,
        ge=2,
        description="most tokens of a prompt and its output; default: the model's context, at most 4,096 on "
        "engines other than openvino",
    )
    weights: WeightFormat = Field(
        WeightFormat.AUTO, description="how weights are held; auto is int8 on a CPU, f16 on a GPU"
    )
    precision: Precision = Field(Precision.AUTO, description="in what activations are computed")
    activation_group: int = Field(
        32,
        ge=32,
        le=256,
        multiple_of=32,
        description="values of an activation that openvino rounds to 8 bits with one scale; "
        "more is faster and less exact",
    )
    kv_cache_type: CacheType = Field(CacheType.AUTO, description="in what keys and values are kept")
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="memory of a worker's key/value cache in GiB; default: from the memory at hand",
    )
    threads: int | None = Field(
        None, ge=1, description="threads that compute; default: the processors this process may use"
    )
    gpu: int = Field(0, ge=0, description="the GPU that computes, by its number, where the engine uses one")
    cuda_graphs: bool = Field(
        False, description="record the launches of a step for each batch size and replay them, on a GPU"
    )
    cache_dir: Path | None = Field(
        None, description="where prepared models are kept; default: the user's cache folder"
    )
    cache_dir_gib: float = Field(
        20.0, ge=0, allow_inf_nan=False, description="size that they may reach before the oldest are removed"
    )
    max_resume_window_s: float = Field(
        60.0, ge=0, le=3600, description="longest time that a stream can be resumed after its call has ended"
    )
    log_memory_mib: int = Field(
        64, ge=1, description="memory of what can still be read; when it is full, requests are refused"
    )
    stall_limit_s: float = Field(
        30.0, gt=0, le=3600, description="seconds after which a client that takes nothing is cut off"
    )
    stuck_after_s: float = Field(
        120.0, gt=0, le=3600, description="seconds after which a step counts as stuck, and its worker as lost"
    )
    drain_grace_s: float = Field(
        30.0, ge=0, le=3600, description="seconds that live streams get to finish after SIGTERM"
    )
    max_message_mib: int = Field(16, ge=1, le=1024, description="largest request message in MiB")
    max_streams_per_connection: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="calls at a time on one connection, others wait in its client; "
        "default: twice what may run and wait",
    )
    max_stop_strings: int = Field(16, ge=0, le=1024, description="stop texts in a request")
    max_stop_bytes: int = Field(256, ge=1, le=65536, description="bytes of a stop text in UTF-8")
    max_stop_token_ids: int = Field(256, ge=0, le=65536, description="stop token ids in a request")
    max_outputs: int = Field(16, ge=1, le=1024, description="outputs of one request")
    max_top_logprobs: int = Field(
        20, ge=0, le=1000, description="most probable tokens that a request may ask for beside each one"
    )
    max_logit_biases: int = Field(
        1024, ge=0, le=65536, description="biases, banned and allowed tokens in a request, each"
    )
    max_constraint_bytes: int = Field(
        65536, ge=1, le=1 << 24, description="bytes of a schema, regular expression, grammar or all choices"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what is logged")
    log_format: LogFormat = Field(LogFormat.TEXT, description="how log lines are laid out")
    log_prompts: bool = Field(False, description="log each request's prompt; outputs are never logged")
    script_text: str | None = Field(
        None, min_length=1, description="engine 'scripted' only: the text it replays to every request"
    )
    script_step_ms: float = Field(
        0.0, ge=0, le=60_000, description="engine 'scripted' only: milliseconds that a step takes"
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_mode(cls, given: Any) -> Any:
        """Put what the mode sets in the place of defaults."""
        try:
            mode = Mode(given.get("mode", Mode.BALANCED))
        except ValueError:
            return given  # refused as a field
        settings: dict[str, object] = dict(MODE_SETTINGS[mode])
        if mode is Mode.LATENCY and given.get("engine") == "onnxruntime":
            settings["weights"] = WeightFormat.INT4
        return settings | given

    @property
    def address(self) -> Address:
        """Where to listen."""
        return Address.parse(self.listen, "--listen")

    @property
    def metrics_address(self) -> Address | None:
        """Where to listen for Prometheus."""
        return None if self.metrics_listen is None else Address.parse(self.metrics_listen, "--metrics-listen")

    @property
    def admin_address(self) -> Address | None:
        """Where to listen for the administration of models."""
        return None if self.admin_listen is None else Address.parse(self.admin_listen, "--admin-listen")

    @property
    def num_admitted(self) -> int:
        """How many requests may run and wait."""
        return self.workers * self.max_running + self.max_waiting

    @property
    def streams_per_connection(self) -> int:
        """Calls at a time on one connection. More than are admitted: a refusal must reach its client."""
        return self.max_streams_per_connection or 2 * self.num_admitted

    @property
    def engine_options(self) -> EngineOptions:
        """What of it concerns the engine."""
        return EngineOptions(
            weights=self.weights,
            precision=self.precision,
            activation_group=self.activation_group,
            cache_type=self.kv_cache_type,
            num_threads=self.threads,
            cache_gib=self.kv_cache_gib,
            max_context=self.max_context,
            max_batch=self.max_running,
            max_step_tokens=self.max_step_tokens,
            num_contexts=self.workers,
            memory_share=1.0 if self.memory_share is None else self.memory_share,
            device=self.gpu,
            cuda_graphs=self.cuda_graphs,
            cache_folder=self.cache_dir,
            cache_folder_gib=self.cache_dir_gib,
        )


def load_settings(flags: Mapping[str, Any], config_file: Path | None = None) -> Settings:
    """Compose the settings from flags (by field name), `STREAMSRV_*` variables and a TOML file.

    Raises:
        SettingsError: a value, a name or the file is wrong; all that is wrong is said at once.
    """
    if config_file is None and os.environ.get(CONFIG_VARIABLE):
        config_file = Path(os.environ[CONFIG_VARIABLE])
    _refuse_unknown_variables()

    class Composed(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            del dotenv_settings, file_secret_settings
            if config_file is None:
                return init_settings, env_settings
            return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, config_file)

    if config_file is not None and not config_file.is_file():
        raise SettingsError(f"the settings file {config_file} does not exist")
    try:
        settings = Composed(**flags)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{config_file} is not valid TOML: {error}") from None
    except OSError as error:
        raise SettingsError(f"cannot read {config_file}: {error.strerror}") from None
    except ValidationError as error:
        raise SettingsError("; ".join(_describe(e, config_file) for e in error.errors())) from None
    _check_together(settings)
    return settings


MODEL_SETTINGS = (
    *("model", "engine", "weights", "precision", "kv_cache_type", "kv_cache_gib", "memory_share"),
    *("max_context", "max_running", "max_waiting", "max_waiting_tokens", "max_waiting_per_caller"),
    *(
        "max_step_tokens",
        "activation_group",
        "workers",
        "threads",
        "gpu",
        "cuda_graphs",
        "log_memory_mib",
        "stuck_after_s",
    ),
    *("prefix_cache", "prompt_lookup"),
    *("script_text", "script_step_ms"),
)
"""What a file of a folder of models can set for its model alone."""


def check_model_settings(model: Mapping[str, Any], origin: Path) -> None:
    """Make sure that a file sets what can be set for a model alone.

    Raises:
        SettingsError: a name is another's.

    """
    for name in model:
        if name not in MODEL_SETTINGS:
            known = ", ".join(MODEL_SETTINGS)
            raise SettingsError(
                f"unknown setting {name!r} in {origin}; a model of a folder can have: {known}"
            )


def settings_of_model(server: Settings, model: Mapping[str, Any], origin: Path) -> Settings:
    """Compose the settings of one model of a folder: its own, where it has them, else the server's.

    Args:
        server: the server's settings.
        model: what is set for the model alone, by field.
        origin: the file that says so.

    Raises:
        SettingsError: a name or a value is wrong; all that is wrong is said at once.

    """
    check_model_settings(model, origin)
    given = {name: getattr(server, name) for name in server.model_fields_set}
    # Said outright, since a variable would set them again.
    given |= dict.fromkeys(("models", "load", "default_model", "admin_listen", "admin_keys"))
    try:
        settings = Settings(**given | dict(model))
    except ValidationError as error:
        raise SettingsError("; ".join(_describe(e, origin) for e in error.errors())) from None
    try:
        _check_together(settings)
    except SettingsError as error:
        raise SettingsError(f"{origin}: {error}") from None
    return settings


def _check_together(settings: Settings) -> None:
    _check_models(settings)
    if settings.max_step_tokens < settings.max_running:
        raise SettingsError(
            f"--max-step-tokens is {settings.max_step_tokens}; it must be at least --max-running "
            f"({settings.max_running}), so that every running output gets a token in a step"
        )
    if (settings.tls_cert is None) != (settings.tls_key is None):
        given, missing = ("--tls-cert", "--tls-key") if settings.tls_cert else ("--tls-key", "--tls-cert")
        raise SettingsError(f"{given} is given without {missing}; TLS needs both")
    if settings.tls_client_ca is not None and settings.tls_cert is None:
        raise SettingsError(
            "--tls-client-ca is given without --tls-cert and --tls-key; clients can show certificates to a "
            "server with TLS alone"
        )
    if not settings.address.is_loopback and settings.tls_cert is None and not settings.allow_plaintext:
        at_risk = "prompts, outputs and API keys" if settings.api_keys else "prompts and outputs"
        raise SettingsError(
            f"--listen {settings.listen} is reachable from other machines, and without TLS {at_risk} can be "
            "read on the way: add --tls-cert and --tls-key, listen on 127.0.0.1, or add --allow-plaintext "
            "where the network is trusted"
        )
    metrics = settings.metrics_address
    if metrics is not None and not metrics.is_loopback and not settings.allow_plaintext:
        raise SettingsError(
            f"--metrics-listen {settings.metrics_listen} is reachable from other machines, and metrics go in "
            "plain text: listen on 127.0.0.1, or add --allow-plaintext where the network is trusted"
        )
    if settings.max_streams_per_connection is not None:
        least = settings.num_admitted
        if settings.max_streams_per_connection < least:
            raise SettingsError(
                f"--max-streams-per-connection is {settings.max_streams_per_connection}; it must be at least "
                f"the {least} requests that may run and wait, or calls would wait unseen in their client"
            )


def _check_models(settings: Settings) -> None:
    if settings.models is None:
        for name in ("load", "default_model", "admin_listen", "admin_keys"):
            if getattr(settings, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise SettingsError(f"{flag} is given without --models, the folder that it is about")
        return
    for name in ("model", "model_name"):
        if name in settings.model_fields_set:
            raise SettingsError(
                f"--models and --{name.replace('_', '-')} exclude each other: what a folder holds is served "
                "under the names of its files"
            )
    address = settings.admin_address
    if address is None:
        if settings.admin_keys is not None:
            raise SettingsError("--admin-keys is given without --admin-listen, the address that they guard")
        return
    if not address.is_loopback:
        raise SettingsError(
            f"--admin-listen {settings.admin_listen} is reachable from other machines; models are loaded and "
            "unloaded from this one alone: listen on 127.0.0.1"
        )


def _refuse_unknown_variables() -> None:
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    known |= {CONFIG_VARIABLE, CLIENT_VARIABLE, API_KEY_VARIABLE}
    for variable in sorted(os.environ):
        if variable.startswith(ENV_PREFIX) and variable not in known:
            raise SettingsError(f"unknown variable {variable}; known: {', '.join(sorted(known))}")


def _describe(error: Any, config_file: Path | None) -> str:  # a TypedDict that pydantic does not export
    name = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] == "extra_forbidden":
        return f"unknown setting {name!r} in {config_file}; known: {', '.join(Settings.model_fields)}"
    flag = "--" + name.replace("_", "-")
    message = error["msg"].replace("Input should", "it must").replace("should have", "must have")
    return f"{flag} (or {ENV_PREFIX}{name.upper()}) is {error['input']!r}: {message}"
