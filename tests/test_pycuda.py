"""Real PyCUDA and cuda-bindings over a libcuda on host memory: what engines/cuda.py says of them is so."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakecuda import Build, CannotBuildError, build
from tests.standins.over_pycuda import MODULES
from tests.standins.pycuda_rig import USED_NAMES

ROOT = Path(__file__).parents[1]
TESTS = ("tests/test_cuda_api.py", "tests/test_trt.py", "tests/integration/test_trt_server.py")
"""Those that run over a rig: the seam's own, and those of the TensorRT engines, alone and behind a server."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def pycuda(tmp_path_factory: pytest.TempPathFactory) -> Build:
    try:
        return build(tmp_path_factory.mktemp("fakecuda"))
    except CannotBuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def report(pycuda: Build, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of running the rig's tests over it."""
    path = tmp_path_factory.mktemp("report") / "report.json"
    command = [sys.executable, "-m", "tests.standins.over_pycuda", str(path), *TESTS]
    done = subprocess.run(
        command, cwd=ROOT, env=pycuda.environment(ROOT), capture_output=True, text=True, check=False
    )
    assert path.exists(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _functions(module: str) -> set[str]:
    """Every function of a file of `engines`, as profilers name it."""
    found: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                found.add(f"{module}:{prefix}{child.name}")
                visit(child, f"{prefix}{child.name}.<locals>.")
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse((ROOT / "engines" / module).read_text()), "")
    return found


def test_the_seam_and_the_engines_above_keep_their_promises_over_pycuda(report: dict[str, Any]) -> None:
    assert report["failed"] == []
    assert report["skipped"] == []
    assert report["num_passed"] > 110


def test_every_function_in_front_of_pycuda_was_run(report: dict[str, Any]) -> None:
    assert set().union(*map(_functions, MODULES)) - set(report["functions"]) == set()


def test_the_names_of_pycuda_that_are_used_were_asked_for(report: dict[str, Any]) -> None:
    assert set(report["names"]) == USED_NAMES


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("FAKECUDA_NO_DEVICE=1", "no GPU can be used: cuInit failed: no CUDA-capable device is detected"),
        ("LD_LIBRARY_PATH=", "PyCUDA cannot be loaded: libcuda.so.1: cannot open shared object file"),
    ],
)
def test_a_machine_without_a_gpu_or_driver_is_told_so(pycuda: Build, variable: str, message: str) -> None:
    program = (
        "from engines.cuda import PyCuda\n"
        "from engines.cuda_api import CudaError\n"
        "try:\n"
        "    PyCuda().open_device(0)\n"
        "except CudaError as error:\n"
        "    print(error)\n"
    )
    name, _, value = variable.partition("=")
    environment = pycuda.environment(ROOT) | {name: value}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert message in done.stdout
