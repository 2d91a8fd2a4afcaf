"""The engines by name."""

import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from engines.api import Engine, EngineError
from engines.checkpoint import open_checkpoint
from engines.options import EngineOptions
from engines.spec import ModelInfo

_LOG = logging.getLogger(__name__)

Progress = Callable[[str, float], None]


def _open_openvino(path: Path, options: EngineOptions, progress: Progress) -> Engine:
    from engines.ov import open_openvino

    return open_openvino(path, options, progress)


def _open_onnxruntime(path: Path, options: EngineOptions, progress: Progress) -> Engine:
    from engines.ort import open_onnxruntime

    return open_onnxruntime(path, options, progress)


def _open_tensorrt(path: Path, options: EngineOptions, progress: Progress) -> Engine:
    from engines.trt import open_trt

    return open_trt("tensorrt", path, options, progress)


def _open_tensorrt_rtx(path: Path, options: EngineOptions, progress: Progress) -> Engine:
    from engines.trt import open_trt

    return open_trt("tensorrt_rtx", path, options, progress)


def _open_scripted(_path: Path, _options: EngineOptions, _progress: Progress) -> Engine:
    from engines.scripted import ScriptedEngine

    return ScriptedEngine()


# Each opener imports its engine's module, and so its package, only when called.
_OPENERS: Mapping[str, Callable[[Path, EngineOptions, Progress], Engine]] = {
    "openvino": _open_openvino,
    "onnxruntime": _open_onnxruntime,
    "tensorrt": _open_tensorrt,
    "tensorrt_rtx": _open_tensorrt_rtx,
    "scripted": _open_scripted,
}

AUTO = "auto"
ENGINE_NAMES = (AUTO, *_OPENERS)
"""What `open_engine` takes."""


def open_engine(
    name: str, model_path: Path, options: EngineOptions, progress: Progress | None = None
) -> Engine:
    """Make a model ready to run on an engine.

    Args:
        name: one of ENGINE_NAMES; "auto" is the best engine of this machine.
        model_path: a GGUF file or a Hugging Face folder.
        options: the settings.
        progress: called with a phase's name and the fraction of it done.

    Raises:
        CheckpointError: the path holds no supported model.
        EngineNotInstalledError: the engine's package is missing.
        EngineError: there is no such engine, or it cannot run the model.

    """
    chosen = best_engine() if name == AUTO else name
    opener = _OPENERS.get(chosen)
    if opener is None:
        raise EngineError(f"there is no engine {name!r}; the engines are {', '.join(ENGINE_NAMES)}")
    return opener(model_path, options, progress or (lambda _phase, _done: None))


def best_engine(root: Path = Path("/")) -> str:
    """Name the engine that "auto" is: TensorRT where it and an NVIDIA GPU are there, else OpenVINO."""
    has_gpu = (root / "dev/nvidia0").exists() or (root / "dev/dxg").exists()  # the second is WSL's
    if not has_gpu:
        return "openvino"
    for name in ("tensorrt", "tensorrt_rtx"):
        if find_spec(name) is not None and find_spec("pycuda") is not None:
            return name
    _LOG.warning(
        "this machine has an NVIDIA GPU, but neither TensorRT nor PyCUDA: computing on the CPU; "
        "for the GPU: pip install 'streamsrv[tensorrt]'"
    )
    return "openvino"


def inspect_model(path: Path) -> ModelInfo:
    """Describe what a path holds, without preparing it.

    Raises:
        CheckpointError: the path holds no supported model.

    """
    with open_checkpoint(path) as checkpoint:
        return checkpoint.info
