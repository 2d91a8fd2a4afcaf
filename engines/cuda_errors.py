"""CUDA's errors as ours.

PyCUDA's exceptions carry no code, only "<call> failed: <the driver's words for the code>", so the words are
asked from the driver that is there and compared.
"""

import ctypes
from collections.abc import Callable
from typing import Final

from engines.cuda_api import CudaDeviceLostError, CudaError, CudaOutOfMemoryError

_OUT_OF_MEMORY: Final = 2

LOST_CODES: Final = {
    # cuda.h (CUDA 13.0) says of these that the process is left in an inconsistent state, that further work
    # returns the same error, or that the process must be relaunched.
    226: "CONTAINED",
    700: "ILLEGAL_ADDRESS",
    702: "LAUNCH_TIMEOUT",
    714: "HARDWARE_STACK_ERROR",
    715: "ILLEGAL_INSTRUCTION",
    716: "MISALIGNED_ADDRESS",
    717: "INVALID_ADDRESS_SPACE",
    718: "INVALID_PC",
    719: "LAUNCH_FAILED",
    721: "TENSOR_MEMORY_LEAK",
    810: "MPS_CLIENT_TERMINATED",
    911: "EXTERNAL_DEVICE",
    # Of these it says that the context, and with it everything in it, cannot be used any more.
    4: "DEINITIALIZED",
    709: "CONTEXT_IS_DESTROYED",
    710: "ASSERT",
    # Of these it does not say whether they stay. Memory or a link has failed: nothing there is to be trusted.
    214: "ECC_UNCORRECTABLE",
    220: "NVLINK_UNCORRECTABLE",
}
"""Codes of errors that stay, by CUDA_ERROR_*."""


class CudaErrors:
    """Makes the exception for a failed call.

    Args:
        words: a code's description, as the driver gives it.

    """

    def __init__(self, words: Callable[[int], str]) -> None:
        self._words = words
        # A driver older than a code has no words for it, and never returns it.
        self._lost = {words(code): name for code, name in LOST_CODES.items()}
        self._lost.pop("", None)
        self._out_of_memory = words(_OUT_OF_MEMORY)

    def from_code(self, call: str, code: int) -> CudaError:
        """Make the exception for a code that a call returned."""
        return self.from_text(f"{call} failed: {self._words(code) or f'error {code}'}")

    def from_text(self, text: str) -> CudaError:
        """Make the exception for "<call> failed: <words>", with or without " - <more>" behind."""
        reason = text.partition(" failed: ")[2].partition(" - ")[0]
        if reason == self._out_of_memory:
            return CudaOutOfMemoryError(text)
        if reason in self._lost:
            return CudaDeviceLostError(
                f"{text} (CUDA_ERROR_{self._lost[reason]}). CUDA can no longer be used in this process; "
                "restart it. If that does not help, look for Xid messages in the kernel's log."
            )
        return CudaError(text)


def driver_words() -> Callable[[int], str]:
    """Give the driver's words for codes: "" for a code that it does not know.

    Raises:
        OSError: there is no driver.

    """
    get_error_string = ctypes.CDLL("libcuda.so.1").cuGetErrorString
    get_error_string.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def words(code: int) -> str:
        text = ctypes.c_char_p()
        get_error_string(code, ctypes.byref(text))
        return (text.value or b"").decode()

    return words
