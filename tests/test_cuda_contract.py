"""The names of other libraries that engines/cuda*.py uses, held against what is there without a GPU."""

import ast
import sys
from pathlib import Path

import pytest

import engines.cuda
import engines.cuda_graphs
from engines.api import EngineNotInstalledError
from engines.cuda import PyCuda
from engines.cuda_api import CudaDeviceLostError, CudaError, CudaOutOfMemoryError
from engines.cuda_errors import LOST_CODES, CudaErrors
from engines.cuda_graphs import CudaGraphs
from tests.standins.pycuda_rig import USED_NAMES

_WORDS = {1: "invalid argument", 2: "out of memory", 719: "unspecified launch failure"}


def _errors() -> CudaErrors:
    return CudaErrors(lambda code: _WORDS.get(code, ""))


def _attributes(path: str, of: str) -> list[ast.Attribute]:
    """Every `<anything>.<of>.<name>` in a file."""
    return [
        node
        for node in ast.walk(ast.parse(Path(path).read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == of
    ]


def test_only_names_that_were_run_over_pycuda_are_used() -> None:
    # tests/test_pycuda.py shows that these exist and were asked for.
    assert {node.attr for node in _attributes(engines.cuda.__file__, "module")} == USED_NAMES


def test_cuda_bindings_has_the_functions_with_as_many_arguments() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    tree = ast.parse(Path(engines.cuda_graphs.__file__).read_text())
    calls = {
        node.func.attr: len(node.args)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Attribute)
        and node.func.value.attr == "_driver"
    }
    assert len(calls) == 6
    for name, num_arguments in calls.items():
        signature = getattr(driver, name).__doc__.splitlines()[0]
        assert signature.startswith(f"{name}(")
        assert signature.count(",") + 1 == num_arguments, signature
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    assert (int(mode), int(driver.CUresult.CUDA_SUCCESS)) == (1, 0)


def test_the_codes_that_stay_have_the_names_that_cuda_gives_them() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    assert {
        int(getattr(driver.CUresult, f"CUDA_ERROR_{name}")): name for name in LOST_CODES.values()
    } == LOST_CODES


def test_without_pycuda_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    with pytest.raises(EngineNotInstalledError, match=r"pip install 'streamsrv\[tensorrt\]'.*CUDA toolkit"):
        PyCuda().open_device(0)


def test_without_cuda_bindings_graphs_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(EngineNotInstalledError, match=r"pip install 'streamsrv\[cuda_graphs\]'"):
        CudaGraphs(_errors())


def test_an_error_is_told_by_the_drivers_words() -> None:
    errors = _errors()
    assert type(errors.from_text("cuMemAlloc failed: out of memory")) is CudaOutOfMemoryError
    assert type(errors.from_text("cuInit failed: invalid argument - with more")) is CudaError
    lost = errors.from_text("cuEventSynchronize failed: unspecified launch failure")
    assert type(lost) is CudaDeviceLostError
    assert str(lost).startswith("cuEventSynchronize failed: unspecified launch failure (CUDA_ERROR_LAUNCH_")


def test_a_code_that_the_driver_has_no_words_for_is_an_ordinary_error() -> None:
    error = _errors().from_code("cuGraphLaunch", 700)
    assert type(error) is CudaError
    assert str(error) == "cuGraphLaunch failed: error 700"
