"""`streamsrv build`: plans ahead of time, and what it says to mistakes."""

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engines.cuda_api import CudaError
from engines.options import EngineOptions, Precision, WeightFormat
from engines.plans import Plans
from engines.prepared import PreparedModels
from engines.registry import inspect_model
from engines.trt import open_trt
from engines.trt_ahead import build_ahead, parse_capability
from engines.trt_library import TENSORRT, TENSORRT_RTX
from streamsrv.cli import _parser, run
from streamsrv.config import Settings, load_settings
from tests import tiny
from tests.conftest import TinyPaths
from tests.standins.cuda import StandInCuda
from tests.standins.tensorrt import StandInTensorrt

SMALL = ["--max-batch", "4", "--max-len", "64", "--max-step-tokens", "32"]
TARGETS = "7.5, 8.0, 8.6, 8.9, 12.0, 12.1"


@pytest.fixture
def model(tiny_models: dict[str, TinyPaths]) -> Path:
    return tiny_models[tiny.LLAMA_TIED.name].gguf


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever machine this is: it has no GPU."""
    from engines import cuda

    def refuse(_self: Any, _index: int) -> Any:
        raise CudaError("no GPU can be used: cuInit failed: no driver")

    monkeypatch.setattr(cuda.PyCuda, "open_device", refuse)


def build(model: Path, cache: Path, *flags: str) -> int:
    return run(["build", "--model", str(model), "--cache-dir", str(cache), *flags])


@pytest.mark.parametrize(
    ("text", "capability"),
    [
        ("8.9", (8, 9)),
        ("89", (8, 9)),
        ("sm89", (8, 9)),
        ("SM_89", (8, 9)),
        ("120", (12, 0)),
        ("12.1", (12, 1)),
    ],
)
def test_a_capability_is_read_in_each_of_its_spellings(text: str, capability: tuple[int, int]) -> None:
    assert parse_capability(text) == capability


@pytest.mark.parametrize("text", ["", "9", "x", "8.9.1", "8.90", "ada", "-89", "1234", "8,9"])
def test_what_is_no_capability_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_capability(text)


def test_an_engine_finds_the_plan_that_was_built_ahead(model: Path, tmp_path: Path) -> None:
    cuda = StandInCuda()
    trt = StandInTensorrt(cuda)
    options = EngineOptions(max_batch=4, max_step_tokens=32, max_context=64, cache_folder=tmp_path)
    (made,) = build_ahead(TENSORRT, model, options, cuda=cuda, library=trt.library)
    assert trt.num_builds == 1
    assert made.build_s is not None
    (again,) = build_ahead(TENSORRT, model, options, cuda=cuda, library=trt.library)
    assert again.path == made.path
    assert again.build_s is None
    open_trt(TENSORRT, model, options, lambda _phase, _done: None, cuda=cuda, library=trt.library).close()
    assert trt.num_builds == 1
    assert cuda.leaks() == []


def test_a_plan_is_built_for_each_target_once(model: Path, tmp_path: Path) -> None:
    trt = StandInTensorrt(StandInCuda(), TENSORRT_RTX)
    options = EngineOptions(max_batch=4, max_step_tokens=32, max_context=64, cache_folder=tmp_path)
    targets = [(8, 9), (12, 0), (8, 9)]
    made = build_ahead(TENSORRT_RTX, model, options, targets, library=trt.library)
    assert [plan.request.target.compute_capability for plan in made] == [(8, 9), (12, 0)]
    assert trt.num_builds == 2
    assert len(Plans(tmp_path).entries()) == 2


def test_no_plan_is_built_if_one_of_the_targets_does_not_know_the_types(model: Path, tmp_path: Path) -> None:
    trt = StandInTensorrt(StandInCuda(), TENSORRT_RTX)
    options = EngineOptions(weights=WeightFormat.FP8, cache_folder=tmp_path)
    with pytest.raises(Exception, match=r"fp8 needs a GPU of compute capability 8\.9 or above"):
        build_ahead(TENSORRT_RTX, model, options, [(8, 9), (8, 6)], library=trt.library)
    assert trt.num_builds == 0


def test_targets_are_not_for_the_library_that_builds_for_its_own_gpu(model: Path, tmp_path: Path) -> None:
    trt = StandInTensorrt(StandInCuda())
    options = EngineOptions(cache_folder=tmp_path)
    with pytest.raises(Exception, match="tensorrt builds a plan for the GPU of the machine"):
        build_ahead(TENSORRT, model, options, [(8, 9)], library=trt.library)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_tensorrt_says_where_to_build(model: Path, tmp_path: Path) -> None:
    trt = StandInTensorrt(StandInCuda())
    options = EngineOptions(cache_folder=tmp_path)
    with pytest.raises(Exception, match=r"on the GPU that will run it, and none can be used here \(no GPU"):
        build_ahead(TENSORRT, model, options, library=trt.library)


def test_a_cache_folder_that_cannot_keep_the_plan_is_refused_before_building(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default folder gives way to a temporary one, which would take the plan with it."""
    trt = StandInTensorrt(StandInCuda(), TENSORRT_RTX)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(PreparedModels, "_writable_folder", lambda _: (temporary, True))
    with pytest.raises(Exception, match="a plan could not be kept"):
        build_ahead(TENSORRT_RTX, model, EngineOptions(max_context=64), [(8, 9)], library=trt.library)
    assert trt.num_builds == 0


# With the real library.


@pytest.fixture
def rtx() -> None:
    pytest.importorskip(
        "tensorrt_rtx", reason="tensorrt-rtx is not installed; it has wheels for x86-64 alone"
    )


@pytest.mark.usefixtures("rtx", "no_gpu")
def test_it_says_what_it_made_and_how_to_serve_with_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(model, tmp_path, "--engine", "tensorrt_rtx", "--target", "8.9", *SMALL) == 0
    said = capsys.readouterr()
    path, size, target, types, sizes, _, command = said.out.splitlines()
    assert Path(path).stat().st_size > 0
    assert re.fullmatch(r"  \d+ MiB, built in \d+\.\d s", size)
    assert target == "  for any GPU of compute capability 8.9"
    assert types == "  weights f16, activations f16"
    assert sizes == "  sequences of up to 64 tokens; prefill of up to 32 tokens, decode of 1 to 4 sequences"
    assert command.startswith("  streamsrv serve --model ")
    assert [line.partition(" ...")[0] for line in said.err.splitlines()] == [
        "read",
        "convert",
        "build for 8.9",
    ]

    assert build(model, tmp_path, "--engine", "tensorrt_rtx", "--target", "sm89", *SMALL) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[0] == path
    assert again[1].endswith("was there already")

    assert run(["cache", "--cache-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"plan of {inspect_model(model).name} (linear-f16-f16-k256), tensorrt_rtx" in shown
    assert "1 prepared models and 1 plans" in shown
    assert run(["cache", "clear", "--cache-dir", str(tmp_path)]) == 0
    assert not Path(path).exists()


@pytest.mark.usefixtures("rtx", "no_gpu")
@pytest.mark.parametrize(
    ("flags", "weights", "precision"),
    [
        (["--precision", "bf16"], WeightFormat.BF16, Precision.BF16),
        (["--precision", "int8"], WeightFormat.INT8, Precision.F16),
        (["--precision", "int4", "bf16"], WeightFormat.INT4, Precision.BF16),
        (["--precision", "bf16", "fp8", "--mode", "latency"], WeightFormat.FP8, Precision.BF16),
    ],
)
def test_the_command_that_it_prints_means_the_plan_that_it_made(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    weights: WeightFormat,
    precision: Precision,
) -> None:
    from engines.plan_key import PlanTarget
    from engines.trt_plan import request_plan

    sizes = [] if "--mode" in flags else SMALL
    assert build(model, tmp_path, "--engine", "tensorrt_rtx", "--target", "89", *flags, *sizes) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    arguments = vars(_parser().parse_args(command[1:]))
    settings = load_settings({k: v for k, v in arguments.items() if k in Settings.model_fields})
    assert (settings.weights, settings.precision) == (weights, precision)
    assert (settings.model, settings.engine) == (str(model), "tensorrt_rtx")
    request = request_plan(inspect_model(model).spec, settings.engine_options, PlanTarget((8, 9)))
    (entry,) = Plans(settings.cache_dir or tmp_path).entries()
    assert entry.key["shape"]["max_batch"] == request.shape.max_batch == settings.max_running
    assert entry.key["shape"]["max_len"] == request.shape.max_len
    assert entry.key["shape"]["max_piece"] == request.shape.max_piece
    assert entry.key["form"] == request.form.label


@pytest.mark.usefixtures("rtx", "no_gpu")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], f"name a compute capability. tensorrt_rtx 1.7.1.116 builds for {TARGETS}"),
        (["--target", "9.0"], f"no plans for compute capability 9.0; it builds them for {TARGETS}"),
        (["--target", "hopper"], "--target: 'hopper' is no compute capability"),
        (["--target", "7.5", "--precision", "bf16"], "bf16 needs a GPU of compute capability 8.0 or above"),
        (["--target", "8.0", "--precision", "fp8"], "fp8 needs a GPU of compute capability 8.9 or above"),
        (["--target", "8.9", "--precision", "int8", "int4"], "--precision is int8 int4; it must be one of"),
        (["--target", "8.9", "--max-batch", "0"], "--max-running"),
        (["--target", "8.9", "--max-batch", "600"], "at least --max-running (600)"),
        (["--target", "8.9", "--mode", "fast"], "--mode"),
    ],
)
def test_a_mistake_is_a_sentence_and_not_a_traceback(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert build(model, tmp_path, "--engine", "tensorrt_rtx", *flags) == 1
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.startswith("streamsrv: ")
    assert "Traceback" not in said.err
    assert said.out == ""


@pytest.mark.usefixtures("rtx")
def test_a_model_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing.gguf"
    assert build(missing, tmp_path, "--engine", "tensorrt_rtx", "--target", "8.9") == 1
    assert "missing.gguf" in capsys.readouterr().err


def test_a_library_that_is_missing_is_named_with_what_to_install(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert build(model, tmp_path, "--engine", "tensorrt") == 1
    assert "the tensorrt engine needs the package tensorrt" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("rtx")
def test_ctrl_c_stops_the_builder_and_leaves_nothing_half_made(demo_path: Path, tmp_path: Path) -> None:
    """The builder looks up between its steps, the longest of which takes seconds."""
    command = [sys.executable, "-m", "streamsrv", "build", "--model", str(demo_path), "--max-len", "1024"]
    command += ["--engine", "tensorrt_rtx", "--target", "8.9", "--cache-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("build for"):
                break
        time.sleep(1.0)  # into the step
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    assert said == ""
    assert "interrupted: the builder stops at its next step" in errors
    assert "Traceback" not in errors
    assert [path for path in (tmp_path / "plans").iterdir() if path.is_dir()] == []
