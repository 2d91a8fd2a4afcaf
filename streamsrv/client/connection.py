"""How clients connect: the options of their channels, and what each call carries."""

from collections.abc import Sequence as Seq
from typing import Any, TypeAlias

ChannelOptions: TypeAlias = Seq[tuple[str, Any]]

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_RESUME_WINDOW_S = 30.0
DEFAULT_MAX_RETRIES = 3

CLOSE_TIMEOUT_S = 2.0
"""How long leaving a stream waits for the server to cancel it; the end of its window does it anyway."""

_OPTIONS: ChannelOptions = (
    ("grpc.max_receive_message_length", 16 << 20),
    # A connection whose other end is silent is dead after this and the next. The third bounds pings that grpc
    # sends for other purposes: while one of them is out, keepalive's own wait behind it, 60 s by default.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),  # a client that only reads sends no data between its pings
    # Reconnections follow the resuming's own waits; by default grpc's grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # how long a connection may take to be made
    # A generation must not be sent again by anyone who does not know whether it runs.
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
)


def channel_options(options: ChannelOptions) -> list[tuple[str, Any]]:
    """List the options of a client's channel; those given win over the client's own."""
    return list({**dict(_OPTIONS), **dict(options)}.items())


def call_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Give the metadata of each call."""
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)
