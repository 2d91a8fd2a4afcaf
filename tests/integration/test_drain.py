"""SIGTERM to a server process whose streams do not end by themselves."""

import signal
import subprocess
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from streamsrv.client import make_request
from streamsrv.v1.inference_pb2_grpc import InferenceServiceStub
from tests.calls import SMALL_WINDOW
from tests.integration.test_cli import TIMEOUT_S, reader, server

GRACE_S = 1.0


def stopped(process: subprocess.Popen[str]) -> tuple[int, float]:
    """Send SIGTERM; the exit code, and how long it took."""
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(TIMEOUT_S)
    return code, time.monotonic() - began


@pytest.mark.parametrize("step_ms", ["20", "1500"])
def test_streams_that_outlive_the_grace_are_told_and_the_exit_is_0_and_in_time(step_ms: str) -> None:
    flags = ("--drain-grace-s", str(GRACE_S), "--script-step-ms", step_ms)
    with server(*flags) as (process, address), reader(address, "--ignore-eos") as (client, _):
        code, took_s = stopped(process)
        assert code == 0
        assert GRACE_S <= took_s < GRACE_S + 2
        _, error = client.communicate(timeout=TIMEOUT_S)
        assert client.returncode == 1
        assert "the server stopped before the output was complete" in error


def test_readers_that_take_nothing_and_open_watches_do_not_hold_up_the_exit() -> None:
    flags = ("--drain-grace-s", str(GRACE_S), "--max-resume-window-s", "60")
    with (
        server(*flags) as (process, address),
        grpc.insecure_channel(address, options=SMALL_WINDOW) as channel,
    ):
        request = make_request("x", ignore_eos=True, max_tokens=6000, max_tokens_per_chunk=1)
        request.stream.resume_window_ms = 60_000
        stalled: Any = InferenceServiceStub(channel).Generate(request)
        next(stalled)
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        next(watch)
        code, took_s = stopped(process)
        assert code == 0
        assert took_s < GRACE_S + 2
        stalled.cancel()
        watch.cancel()


def test_a_second_signal_tells_the_readers_too() -> None:
    with (
        server("--script-step-ms", "300", "--drain-grace-s", "3000") as (process, address),
        reader(address, "--ignore-eos") as (client, _),
    ):
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        for line in process.stderr:
            if "stopping" in line:
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 130
        _, error = client.communicate(timeout=TIMEOUT_S)
        assert "the server stopped before the output was complete" in error
