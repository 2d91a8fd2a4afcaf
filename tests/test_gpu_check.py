"""The script that checks a real GPU: what it says without one, and its checks over the stand-ins."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines.options import EngineOptions
from engines.trt_library import LIBRARY_NAMES
from tests import tiny
from tests.conftest import TinyPaths
from tests.gpu.checks import CHECKS
from tests.gpu.results import Status, as_json, as_table
from tests.gpu.run import NO_GPU, run
from tests.trt_rig import make_rig


def has_gpu() -> bool:
    try:
        from engines.cuda import PyCuda

        PyCuda().open_device(0).close()
    except Exception:
        return False
    return True


SCRIPT = Path(__file__).parent / "gpu" / "check.py"


@pytest.mark.parametrize("name", LIBRARY_NAMES)
def test_without_a_gpu_the_script_says_so_and_exits_with_a_code_of_its_own(name: str, tmp_path: Path) -> None:
    if has_gpu():
        pytest.skip("there is a GPU: run tests/gpu/check.py")
    report = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--engine", name, "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == NO_GPU
    assert "there is no GPU to check on" in done.stderr
    assert done.stdout == ""
    assert not report.exists()


@pytest.mark.parametrize("name", LIBRARY_NAMES)
def test_the_checks_pass_over_the_stand_ins(
    name: str, tiny_models: dict[str, TinyPaths], tmp_path: Path
) -> None:
    rig = make_rig(name)
    options = EngineOptions(max_batch=8, max_step_tokens=64)
    model = tiny_models[tiny.LLAMA_TIED.name].gguf
    results = run(rig.cuda, rig.trt.library, model, tmp_path, options)
    assert {result.name: result.findings for result in results if result.status is not Status.PASS} == {}
    assert [result.name for result in results] == list(CHECKS)
    assert json.loads(as_json(results))["passed"] is True
    assert as_table(results).row_count == len(results)
    rig.assert_all_released()
