"""Runs tests over real PyCUDA and the libcuda stand-in, and reports as JSON; started by tests/test_pycuda.py.

    python -m tests.standins.over_pycuda REPORT TESTS...

PyCUDA has to be importable, and tests/fakecuda to be what the loader finds as libcuda.so.1.
"""

import json
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.standins.cuda_rig import VARIABLE
from tests.standins.pycuda_rig import record_names

MODULES = ("cuda.py", "cuda_graphs.py", "cuda_errors.py")
"""The files of `engines` whose functions are all to be run."""


class _Outcomes:
    """Notes how each test ended: a pytest plugin."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.skipped: list[str] = []
        self.num_passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid}: {report.longreprtext}")
        elif report.skipped:
            self.skipped.append(f"{report.nodeid}: {report.longreprtext}")
        elif report.when == "call":
            self.num_passed += 1


def main(report: Path, arguments: list[str]) -> int:
    """Run the tests; pytest's exit code."""
    os.environ[VARIABLE] = "pycuda"
    engines = Path(__file__).parents[2] / "engines"
    watched = {str(engines / name) for name in MODULES}
    ran: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename in watched:
            ran.add(frame.f_code)

    names, outcomes = record_names(), _Outcomes()
    threading.setprofile(note)
    sys.setprofile(note)
    code = pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[outcomes])
    sys.setprofile(None)
    threading.setprofile(None)
    functions = sorted({f"{Path(code.co_filename).name}:{code.co_qualname}" for code in ran})
    report.write_text(
        json.dumps(
            {
                "num_passed": outcomes.num_passed,
                "failed": outcomes.failed,
                "skipped": outcomes.skipped,
                "names": sorted(names),
                "functions": functions,
            }
        )
    )
    return int(code)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
