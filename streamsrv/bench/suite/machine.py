"""What a measurement was made on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from engines.memory import usable_processors

_PACKAGES = ("streamsrv", "openvino", "onnxruntime", "grpcio", "numpy")


def describe_machine() -> str:
    """The processor, the memory and the versions, in a sentence each."""
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    memory_gib = psutil.virtual_memory().total / 2**30
    return (
        f"{_processor()}, {usable_processors()} processors usable, {memory_gib:.0f} GiB of memory, "
        f"{platform.system()} {platform.release()}. Python {platform.python_version()}, "
        f"{', '.join(versions)}."
    )


def describe_load() -> str:
    """The load averages over 1, 5 and 15 minutes: what else the machine had to do."""
    return "load average " + ", ".join(f"{load:.2f}" for load in os.getloadavg())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    features = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{names[0] if names else platform.machine()} ({', '.join(features)})"
