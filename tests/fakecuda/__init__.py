"""Builds what it takes to run real PyCUDA without a GPU: a libcuda.so.1 on host memory, and PyCUDA itself.

PyCUDA's package is source only. Of a CUDA toolkit it needs no more than cuda.h and cudaProfiler.h, which
two small wheels bring, and a libcuda.so to link to, which is the stand-in. It is compiled once and kept in
the user's cache folder.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from platformdirs import user_cache_path

PYCUDA: Final = "pycuda==2026.1"
"""The version whose source engines/cuda.py was written by."""
HEADERS: Final = ("nvidia-cuda-runtime==13.0.*", "nvidia-cuda-profiler-api==13.0.*")
HELPERS: Final = ("pytools", "mako", "cuda-bindings>=13,<14")
"""What PyCUDA imports, and what engines/cuda_graphs.py does."""

_SOURCES: Final = Path(__file__).parent
_COMPILE: Final = ("gcc", "-std=c11", "-O2", "-g", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror")
_LINK: Final = (*_COMPILE, "-shared", "-Wl,-soname,libcuda.so.1")


class CannotBuildError(Exception):
    """Something that this machine or its network does not have; the message says what."""


@dataclass(frozen=True, slots=True)
class Build:
    """Where everything is."""

    packages: Path
    """PyCUDA and what it imports."""
    library: Path
    """The folder with libcuda.so.1."""

    def environment(self, root: Path) -> dict[str, str]:
        """Give the environment for a process that is to use it, and the packages under `root`."""
        paths = [str(root), str(self.packages)]
        return os.environ | {"LD_LIBRARY_PATH": str(self.library), "PYTHONPATH": os.pathsep.join(paths)}


def build(work: Path) -> Build:
    """Compile the library into `work`, and PyCUDA where that was not done before.

    Raises:
        CannotBuildError: there is no compiler, or a package cannot be had.
        subprocess.CalledProcessError: something did not compile.

    """
    for tool in ("gcc", "g++", "nm"):
        if shutil.which(tool) is None:
            raise CannotBuildError(f"there is no {tool} on the PATH")
    kept = _kept_folder()
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            made = _build_pycuda(Path(folder))
            try:
                made.rename(kept)
            except OSError:
                if not kept.exists():  # else another process was quicker
                    raise
    headers, packages = kept / "headers", kept / "packages"
    library = work / "lib"
    library.mkdir()
    objects = _compile(headers, work)
    needed = _symbols("--undefined-only", next((packages / "pycuda").glob("_driver*.so")))
    plain = work / "libplain.so"
    _run(*_LINK, "-o", plain, *objects)
    rest = work / "rest.c"
    missing = sorted(needed - _symbols("--defined-only", plain))
    # CUDA_ERROR_NOT_SUPPORTED, whatever the arguments.
    rest.write_text("".join(f"int {name}(void);\nint {name}(void) {{ return 801; }}\n" for name in missing))
    _run(*_LINK, "-o", library / "libcuda.so.1", *objects, rest)
    return Build(packages, library)


def _kept_folder() -> Path:
    made_of = zlib.crc32(" ".join((PYCUDA, *HEADERS, *HELPERS)).encode())
    name = f"pycuda-{made_of:08x}-{sysconfig.get_config_var('SOABI')}"
    return user_cache_path("streamsrv") / "tests" / name


def _build_pycuda(folder: Path) -> Path:
    made = folder / "made"
    packages, headers = made / "packages", made / "headers"
    source = folder / "source"
    source.mkdir()
    _fetch("download", "--no-deps", "--no-binary", "pycuda", "--dest", folder, PYCUDA)
    with tarfile.open(next(folder.glob("pycuda-*.tar.gz"))) as archive:
        # Python before 3.11.4 knows no filters, and takes no notice of this.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(source)
    _fetch("install", "--target", packages, *HELPERS)
    _fetch("install", "--no-deps", "--target", folder / "toolkit", *HEADERS)
    shutil.copytree(next(folder.glob("toolkit/nvidia/*/include")), headers)
    # The linker forgets a library that resolves nothing, so this has to be more than an empty one.
    _run(*_LINK, "-o", folder / "libcuda.so", *_compile(headers, folder))
    tree = next(source.iterdir())
    (tree / "siteconf.py").write_text(
        f"CUDA_INC_DIR = [{str(headers)!r}]\nCUDADRV_LIB_DIR = [{str(folder)!r}]\n"
        "CUDA_ENABLE_CURAND = False\nCUDA_ENABLE_GL = False\n"
    )
    _pip("install", "--no-deps", "--target", packages, tree)
    return made


def _compile(headers: Path, folder: Path) -> list[Path]:
    objects = []
    for source in sorted(_SOURCES.glob("*.c")):
        objects.append(folder / f"{source.stem}.o")
        _run(*_COMPILE, "-isystem", headers, "-c", "-o", objects[-1], source)
    return objects


def _symbols(which: str, library: Path) -> set[str]:
    lines = _run("nm", "-D", which, library).splitlines()
    return {name for line in lines if (name := line.split()[-1]).startswith("cu")}


def _fetch(*arguments: str | Path) -> None:
    try:
        _pip(*arguments)
    except subprocess.CalledProcessError as error:
        raise CannotBuildError(f"pip {arguments[0]} failed: {error.stderr.strip()[-500:]}") from error


def _pip(*arguments: str | Path) -> None:
    # Not optimised, since only what it does counts: twice as fast to compile.
    _run(sys.executable, "-m", "pip", *arguments, environment=os.environ | {"CFLAGS": "-O0 -g0"})


def _run(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True, env=environment
    )
    return done.stdout
