"""`streamsrv build`."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.options import Precision, WeightFormat
from streamsrv.cli.progress_bars import progress_bars
from streamsrv.cli.setting_help import setting_help
from streamsrv.config import ENV_PREFIX, Settings, load_settings
from streamsrv.errors import SettingsError
from streamsrv.log_format import configure_logging

if TYPE_CHECKING:
    from engines.plan_key import PlanShape
    from engines.trt_ahead import MadePlan

_ENGINES = ("tensorrt", "tensorrt_rtx")
_MIB = 2**20
_FLOATS = {
    "fp16": (WeightFormat.F16, Precision.F16),
    "bf16": (WeightFormat.BF16, Precision.BF16),
}
_FEW_BITS = {"int8": WeightFormat.INT8, "int4": WeightFormat.INT4, "fp8": WeightFormat.FP8}
_PRECISIONS = (*_FLOATS, *_FEW_BITS)


def add_command(commands: Any) -> None:  # argparse's own type for it is private
    """Add the command to the program's."""
    build = commands.add_parser(
        "build",
        help="build a model's TensorRT plan ahead of time",
        description="Build a model's TensorRT plan ahead of time, into the folder where 'streamsrv serve' "
        "looks for it; without this, serve builds it on its first start. Prints what was made, and the "
        "command that serves with it. A plan fits one model, one version of the library, one kind of GPU, "
        "and the sizes below; tensorrt builds it on the GPU that will run it, tensorrt_rtx on any machine.",
        epilog="Settings come from flags, STREAMSRV_* variables and a TOML file, as serve takes them, so "
        "that both mean the same plan. Example, without a GPU: streamsrv build --engine tensorrt_rtx "
        "--target 8.9 --precision int8",
    )
    add = build.add_argument
    add("--model", metavar="PATH|demo", help=setting_help("model"))
    add("--engine", choices=_ENGINES, required=True, help="for which engine; the package must be installed")
    add(
        "--target",
        action="append",
        default=[],
        metavar="CC",
        help="tensorrt_rtx only: compute capability of the GPUs to build for, as 8.9, 89 or sm89; may be "
        "repeated, one plan each; default: this machine's GPU",
    )
    add(
        "--precision",
        nargs="+",
        choices=_PRECISIONS,
        metavar="KIND",
        help="fp16 or bf16; or int8, int4 or fp8, which hold the weights so and compute in fp16, or in bf16 "
        "if that is named, too: --precision int8 bf16 (default: fp16)",
    )
    add("--max-batch", "--max-running", dest="max_running", metavar="N", help=setting_help("max_running"))
    add("--max-len", "--max-context", dest="max_context", metavar="N", help=setting_help("max_context"))
    add("--max-step-tokens", metavar="N", help=setting_help("max_step_tokens"))
    add("--mode", metavar="MODE", help=setting_help("mode"))
    add("--gpu", metavar="N", help=setting_help("gpu"))
    add("--cache-dir", metavar="DIR", help=setting_help("cache_dir"))
    add("--config", type=Path, metavar="FILE", help=f"TOML file with settings; or {ENV_PREFIX}CONFIG")
    add("--log-level", metavar="LEVEL", help="debug shows what TensorRT says (default: warning)")
    build.set_defaults(command=_build)


def _build(arguments: argparse.Namespace) -> None:
    from engines.demo_model import model_path
    from engines.trt_ahead import build_ahead, parse_capability

    flags = {
        name: value
        for name, value in vars(arguments).items()
        if name in Settings.model_fields and value is not None and name != "precision"
    }
    flags = {"log_level": "warning"} | flags | _formats(arguments.precision)
    settings = load_settings(flags, arguments.config)
    configure_logging(settings.log_level, settings.log_format)
    try:
        targets = [parse_capability(target) for target in arguments.target]
    except ValueError as error:
        raise SettingsError(f"--target: {error}") from None
    path = model_path(settings.model)
    with progress_bars() as report:
        plans = build_ahead(arguments.engine, path, settings.engine_options, targets, report)
    for plan in plans:
        _describe(plan)
    print("serve with it:" if len(plans) == 1 else "serve with the one that fits the GPU:")
    print(f"  {shlex.join(_serve_command(settings, plans[0]))}")


def _formats(kinds: list[str] | None) -> dict[str, str]:
    """Turn --precision into the settings of serve: what weights are held in, and what is computed in."""
    if kinds is None:
        return {}
    few = [kind for kind in dict.fromkeys(kinds) if kind in _FEW_BITS]
    floats = [kind for kind in dict.fromkeys(kinds) if kind in _FLOATS]
    if len(few) > 1 or len(floats) > 1:
        raise SettingsError(
            f"--precision is {' '.join(kinds)}; it must be one of {', '.join(_PRECISIONS)}, or one of "
            f"{', '.join(_FEW_BITS)} with one of {', '.join(_FLOATS)}"
        )
    weights, activations = _FLOATS[floats[0]] if floats else (WeightFormat.F16, Precision.F16)
    if few:
        weights = _FEW_BITS[few[0]]
    return {"weights": weights.value, "precision": activations.value}


def _describe(plan: "MadePlan") -> None:
    made = "was there already" if plan.build_s is None else f"built in {plan.build_s:.1f} s"
    form, shape = plan.request.form, plan.request.shape
    print(plan.path)
    print(f"  {plan.size_bytes / _MIB:,.0f} MiB, {made}")
    print(f"  for {plan.request.target.label}")
    print(f"  weights {form.weights.value}, activations {form.activations.value}")
    print(f"  sequences of up to {shape.max_len:,} tokens; {_profiles(shape)}")


def _profiles(shape: "PlanShape") -> str:
    decode = (f"{least} to {most}" if least < most else f"{most}" for least, _, most in _batches(shape))
    return f"prefill of up to {shape.max_piece:,} tokens, decode of {' and '.join(decode)} sequences"


def _batches(shape: "PlanShape") -> "list[tuple[int, int, int]]":
    return [profile.batch for profile in shape.profiles[1:]]


def _serve_command(settings: Settings, plan: "MadePlan") -> list[str]:
    """Write out every setting that the plan depends on: the defaults may be others where it is served."""
    options = plan.options
    command = ["streamsrv", "serve", "--model", settings.model, "--engine", plan.library]
    command += ["--weights", options.weights.value, "--precision", options.precision.value]
    command += ["--max-running", str(options.max_batch), "--max-context", str(options.max_context)]
    command += ["--max-step-tokens", str(options.max_step_tokens)]
    if settings.cache_dir is not None:
        command += ["--cache-dir", str(settings.cache_dir)]
    if settings.gpu:
        command += ["--gpu", str(settings.gpu)]
    return command
