from dataclasses import fields
from pathlib import Path

import pytest

from engines.options import WeightFormat
from streamsrv.config import Address, Settings, load_settings
from streamsrv.errors import SettingsError
from streamsrv.request import RequestLimits


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in os.environ:
        if name.startswith("STREAMSRV_"):
            monkeypatch.delenv(name)


def test_a_flag_wins_over_a_variable_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "streamsrv.toml"
    file.write_text('max_running = 3\nmax_waiting = 3\nworkers = 3\nweights = "float32"\n')
    monkeypatch.setenv("STREAMSRV_MAX_WAITING", "2")
    monkeypatch.setenv("STREAMSRV_WORKERS", "2")
    settings = load_settings({"workers": "1"}, file)
    assert (settings.max_running, settings.max_waiting, settings.workers) == (3, 2, 1)
    assert settings.weights is WeightFormat.FLOAT32
    assert settings.max_step_tokens == Settings().max_step_tokens


def test_the_file_can_be_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "streamsrv.toml"
    file.write_text("max_running = 5\n")
    monkeypatch.setenv("STREAMSRV_CONFIG", str(file))
    assert load_settings({}).max_running == 5


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"threads": "0"}, "--threads (or STREAMSRV_THREADS) is '0'"),
        ({"threads": "many"}, "integer"),
        ({"weights": "int3"}, "'f16', 'bf16' or 'float32'"),
        ({"kv_cache_gib": "nan"}, "--kv-cache-gib"),
        ({"kv_cache_gib": "-1"}, "greater than 0"),
        ({"max_running": "700"}, "at least --max-running"),
        ({"listen": "localhost"}, "HOST:PORT"),
        ({"listen": "127.0.0.1:99999"}, "HOST:PORT"),
        ({"listen": "0.0.0.0:1"}, "--allow-plaintext"),
        (
            {"listen": "0.0.0.0:1", "api_keys": "keys"},
            "without TLS prompts, outputs and API keys can be read",
        ),
        ({"tls_cert": "a.crt"}, "--tls-cert is given without --tls-key"),
        ({"tls_key": "a.key"}, "--tls-key is given without --tls-cert"),
        ({"tls_client_ca": "ca.pem"}, "--tls-client-ca is given without --tls-cert"),
        ({"tls_client_ca": "ca.pem", "listen": "0.0.0.0:1"}, "--tls-client-ca is given without --tls-cert"),
        ({"max_streams_per_connection": "319"}, "at least the 320 requests that may run and wait"),
        ({"max_stop_bytes": "0"}, "--max-stop-bytes"),
        ({"log_level": "loud"}, "'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_a_wrong_value_is_one_sentence_that_names_it(flags: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        {"listen": "0.0.0.0:1", "tls_cert": "a.crt", "tls_key": "a.key"},
        {"listen": "0.0.0.0:1", "tls_cert": "a.crt", "tls_key": "a.key", "api_keys": "keys"},
        {"listen": "0.0.0.0:1", "api_keys": "keys", "allow_plaintext": "yes"},
        {"listen": "127.0.0.1:1", "api_keys": "keys"},
    ],
)
def test_what_is_encrypted_or_stays_on_the_machine_or_was_allowed_may_be_listened_on(
    flags: dict[str, str],
) -> None:
    load_settings(flags)


def test_a_connection_may_have_more_streams_than_are_admitted_so_that_refusals_arrive() -> None:
    assert load_settings({}).streams_per_connection == 640
    assert load_settings({"workers": "2", "max_waiting": "0"}).streams_per_connection == 256
    assert load_settings({"max_streams_per_connection": "320"}).streams_per_connection == 320


def test_the_bounds_on_a_request_default_to_those_that_a_parsed_request_has_by_itself() -> None:
    settings, limits = load_settings({}), RequestLimits()
    for field in fields(RequestLimits):
        assert getattr(settings, field.name) == getattr(limits, field.name)


def test_all_wrong_values_are_said_at_once() -> None:
    with pytest.raises(SettingsError, match=r"--workers.*--threads"):
        load_settings({"threads": "0", "workers": "0"})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("max_runing = 3", "unknown setting 'max_runing'"),
        ("max_running = ", "not valid TOML"),
        (None, "exist"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "streamsrv.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError, match=said):
        load_settings({}, file)


def test_a_misspelt_variable_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSRV_MODLE", "x")
    with pytest.raises(SettingsError, match="unknown variable STREAMSRV_MODLE"):
        load_settings({})


def test_plain_text_beyond_loopback_needs_its_flag() -> None:
    settings = load_settings({"listen": "0.0.0.0:50051", "allow_plaintext": True})
    assert settings.address == Address("0.0.0.0", 50051)


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051, True),
        ("[::1]:0", "::1", 0, True),
        ("localhost:1", "localhost", 1, True),
        ("[::]:1", "::", 1, False),
        ("10.0.0.1:1", "10.0.0.1", 1, False),
        ("example.org:1", "example.org", 1, False),
    ],
)
def test_an_address_is_read_and_written(text: str, host: str, port: int, loopback: bool) -> None:
    address = Address.parse(text, "--listen")
    assert (address.host, address.port, address.is_loopback) == (host, port, loopback)
    assert str(address) == text


def test_every_setting_is_documented() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().max_running = 3  # type: ignore[misc]


def test_a_mode_sets_what_is_not_given() -> None:
    balanced, latency, throughput = (
        load_settings({"mode": m}) for m in ("balanced", "latency", "throughput")
    )
    assert balanced.model_dump() == load_settings({}).model_dump()
    assert (latency.max_running, latency.max_step_tokens, latency.min_chunk_interval_ms) == (8, 128, 0)
    assert (throughput.max_running, throughput.max_step_tokens) == (128, 512)
    assert (latency.activation_group, throughput.activation_group) == (32, 64)
    assert throughput.min_chunk_interval_ms == 50
    assert latency.weights is WeightFormat.AUTO


def test_what_is_given_wins_over_the_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "streamsrv.toml"
    file.write_text('mode = "latency"\nmax_step_tokens = 99\n')
    monkeypatch.setenv("STREAMSRV_MIN_CHUNK_INTERVAL_MS", "7")
    settings = load_settings({"max_running": 3}, file)
    assert (settings.max_running, settings.max_step_tokens, settings.min_chunk_interval_ms) == (3, 99, 7)


def test_latency_on_onnxruntime_takes_int4_weights_unless_others_are_given() -> None:
    settings = load_settings({"mode": "latency", "engine": "onnxruntime"})
    assert settings.weights is WeightFormat.INT4
    settings = load_settings({"mode": "latency", "engine": "onnxruntime", "weights": "int8"})
    assert settings.weights is WeightFormat.INT8


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match="'balanced', 'latency' or 'throughput'"):
        load_settings({"mode": "fast"})
