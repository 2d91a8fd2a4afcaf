"""What a server process prints and logs."""

import json
import re
import signal
import subprocess
import urllib.request

import grpc
import pytest

from streamsrv.client import make_request
from streamsrv.v1.inference_pb2_grpc import InferenceServiceStub
from tests.integration.test_cli import TIMEOUT_S, server, streamsrv

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ \S+: ")
FORGED = "mine\n2026-01-01T00:00:00.000Z INFO streamsrv.call_log: Generate reason=STOP\x1b[2K"


def call(address: str, prompt: str, request_id: str = "") -> None:
    """Make one call with the generated stub and read it to its end."""
    with grpc.insecure_channel(address) as channel:
        stub = InferenceServiceStub(channel)
        for _ in stub.Generate(make_request(prompt, request_id=request_id, max_tokens=5)):
            pass


def logged(process: subprocess.Popen[str]) -> list[str]:
    """Stop a server; what it has logged."""
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    return error.splitlines()


def test_metrics_are_on_the_port_that_the_second_line_names() -> None:
    with server("--metrics-listen", "127.0.0.1:0") as (process, address):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("metrics on 127.0.0.1:")
        call(address, "x")
        url = f"http://{line.removeprefix('metrics on ').strip()}/metrics"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            text = response.read().decode()
        assert 'streamsrv_requests_total{model="scripted",reason="LENGTH"} 1.0' in text
        assert "process_resident_memory_bytes" in text


def test_metrics_beyond_loopback_need_a_flag() -> None:
    done = streamsrv("serve", "--engine", "scripted", "--metrics-listen", "0.0.0.0:0")
    assert done.returncode == 1
    assert "--allow-plaintext" in done.stderr
    assert "--metrics-listen 0.0.0.0:0" in done.stderr


def test_no_caller_can_forge_a_line() -> None:
    with server() as (process, address):
        call(address, "a prompt", request_id=FORGED)
        lines = logged(process)
    assert all(LINE.match(line) for line in lines), lines
    (line,) = [line for line in lines if "Generate" in line]
    assert f"request_id={json.dumps(FORGED)} " in line
    assert " reason=LENGTH " in line
    assert "prompt=" not in line


@pytest.mark.parametrize("flag", ["--log-prompts", "--no-log-prompts"])
def test_every_line_is_an_object_where_that_is_asked_for(flag: str) -> None:
    with server("--log-format", "json", flag) as (process, address):
        call(address, "line\nand line", request_id=FORGED)
        lines = [json.loads(line) for line in logged(process)]
    (line,) = [line for line in lines if line["message"] == "Generate"]
    assert line["request_id"] == FORGED
    assert line["reason"] == "LENGTH"
    assert line["output_tokens"] == 5
    assert line.get("prompt") == ("line\nand line" if flag == "--log-prompts" else None)
