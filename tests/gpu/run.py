"""Making the checks, and reporting them."""

import argparse
import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from engines.api import DeviceLostError, EngineError, StreamsrvError
from engines.cuda import PyCuda
from engines.cuda_api import Cuda
from engines.demo_model import demo_model_path
from engines.options import EngineOptions
from engines.trt_library import LIBRARY_NAMES, TENSORRT, TrtLibrary, load_library
from tests.gpu.checks import CHECKS, Check, SkippedError
from tests.gpu.results import Result, Status, as_json, as_table
from tests.gpu.setup import CheckError, Setup, make_references

NO_GPU = 3
"""Exit code where there is nothing to check on."""


def main(description: str | None = None) -> None:
    """Run the checks that the arguments ask for; `description` is for --help."""
    parser = argparse.ArgumentParser(
        prog="tests/gpu/check.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engine", choices=LIBRARY_NAMES, default=TENSORRT, help="default: tensorrt")
    parser.add_argument("--model", metavar="PATH", help="a GGUF file or a folder; default: the demo model")
    parser.add_argument("--device", type=int, default=0, help="which GPU; default: 0")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="keep plans there; default: nowhere")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    parser.add_argument(
        "--only",
        choices=list(CHECKS),
        metavar="CHECK",
        action="append",
        help=f"make this check alone; may be repeated: {'; '.join(CHECKS)}",
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    options = EngineOptions(max_context=1024, max_batch=64, device=arguments.device)
    try:
        library = load_library(arguments.engine)
        cuda = PyCuda()
        cuda.open_device(arguments.device).close()
    except EngineError as error:
        print(f"nothing was checked, because there is no GPU to check on: {error}", file=sys.stderr)
        sys.exit(NO_GPU)
    with tempfile.TemporaryDirectory(prefix="streamsrv-check-") as folder:
        try:
            model = Path(arguments.model) if arguments.model else demo_model_path()
            results = run(
                cuda, library, model, arguments.cache or Path(folder), options, arguments.only, _say
            )
        except StreamsrvError as error:
            sys.exit(f"the reference could not be computed: {error}")
    Console().print(as_table(results))
    if arguments.json:
        arguments.json.write_text(as_json(results), encoding="utf-8")
    sys.exit(any(result.status is Status.FAIL for result in results))


def run(
    cuda: Cuda,
    library: TrtLibrary,
    model: Path,
    cache: Path,
    options: EngineOptions,
    only: list[str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Make the checks, one after the other, on one model.

    Raises:
        StreamsrvError: the reference could not be computed on the CPU.

    """
    say("computing the reference on the CPU")
    setup = Setup(cuda, library, model, cache, options, make_references(model, cache))
    results: list[Result] = []
    for name in only or CHECKS:
        say(name)
        results.append(_judge(name, CHECKS[name], setup))
    return results


def _judge(name: str, check: Check, setup: Setup) -> Result:
    began_s = time.monotonic()
    try:
        status, findings = Status.PASS, check(setup)
    except SkippedError as error:
        status, findings = Status.SKIP, str(error)
    except (CheckError, DeviceLostError) as error:
        status, findings = Status.FAIL, str(error)
    except Exception as error:
        status, findings = Status.FAIL, "".join(traceback.format_exception(error, limit=-4)).strip()
    return Result(name, status, findings, time.monotonic() - began_s)


def _say(what: str) -> None:
    print(f"check: {what}", file=sys.stderr, flush=True)
