"""CUDA for a test to run over: the stand-in in Python, or, where it was built, real PyCUDA over libcuda's.

`tests/test_pycuda.py` builds the second and runs the tests that use a rig again, with the environment
variable set; everywhere else it is the first.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from engines.cuda_api import Device
from tests.standins.cuda import StandInCuda
from tests.standins.cuda_gpu import Call, Failure

VARIABLE = "STREAMSRV_TEST_CUDA"


class RigDevice(Device, Protocol):
    """`engines.cuda_api.Device`, and what tests need besides."""

    @property
    def num_calls(self) -> Mapping[Call, int]:
        """How often each call was made."""
        ...

    def fail(self, call: Call, failure: Failure, nth: int = 1) -> None:
        """Let the nth call from now of a kind fail."""

    def lose(self) -> None:
        """Lose the GPU now: every later call fails with `Failure.DEVICE_LOST`."""


class CudaRig(Protocol):
    """`engines.cuda_api.Cuda`, and what tests and stand-ins of libraries need besides."""

    def open_device(self, index: int) -> RigDevice: ...
    def leaks(self) -> list[str]:
        """What is not closed."""
        ...

    def enqueue(self, handle: int, task: Callable[[], None], name: str) -> None:
        """Queue a call on the stream with that handle; what it raises stays as a launch failure."""

    def view(self, address: int, num_bytes: int) -> Any:
        """Device memory as an array of bytes, for use while a task runs."""
        ...

    def is_captured(self, handle: int) -> bool:
        """Whether the stream with that handle is captured now."""
        ...

    def take(self, num_bytes: int, what: str) -> Callable[[], None]:
        """Allocate memory of the current device for a library; returns what frees it."""
        ...


def make_cuda_rig(total_bytes: int = 1 << 30, *, lazy: bool = False) -> CudaRig:
    """Make the rig that the environment asks for, with so much device memory and two GPUs.

    Lazy streams run nothing before something waits for it.
    """
    if os.environ.get(VARIABLE) == "pycuda":
        from tests.standins.pycuda_rig import PyCudaRig

        return PyCudaRig(total_bytes, lazy=lazy)
    return StandInCuda(total_bytes=total_bytes, num_devices=2, lazy=lazy)
