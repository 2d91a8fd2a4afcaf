"""Loading TensorRT's module, and its log."""

import gc
import logging
import platform
import sys
import threading
from weakref import ref

import pytest

from engines.api import EngineNotInstalledError
from engines.trt_library import TENSORRT, TENSORRT_RTX, TrtLog, load_library
from tests.standins.cuda import StandInCuda
from tests.standins.tensorrt import StandInTensorrt
from tests.standins.trt_names import Severity


@pytest.fixture
def module() -> StandInTensorrt:
    return StandInTensorrt(StandInCuda())


@pytest.mark.parametrize("name", [TENSORRT, TENSORRT_RTX])
@pytest.mark.parametrize(
    ("system", "machine", "remedy"),
    [
        ("linux", "x86_64", "install it with: pip install 'streamsrv[{name}]'"),
        ("linux", "aarch64", "install it with: pip install 'streamsrv[{name}]'"),
        ("win32", "AMD64", "install it with: pip install 'streamsrv[{name}]'"),
        ("darwin", "arm64", "NVIDIA publishes none for darwin on arm64; take another engine"),
        ("linux", "ppc64le", "NVIDIA publishes none for linux on ppc64le; take another engine"),
    ],
)
def test_a_missing_library_is_named_with_what_can_be_done_here(
    name: str, system: str, machine: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(EngineNotInstalledError) as error:
        load_library(name)
    assert f"the {name} engine needs the package {name.replace('_', '-')} (" in str(error.value)
    assert str(error.value).endswith(remedy.format(name=name))


def test_a_library_without_its_shared_objects_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel of the bindings can be there without that of the libraries."""

    def fail(_name: str) -> None:
        raise OSError("libnvinfer.so.11: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(EngineNotInstalledError, match=r"libnvinfer\.so\.11"):
        load_library(TENSORRT)


@pytest.mark.parametrize(
    ("severity", "level"),
    [
        (Severity.INTERNAL_ERROR, logging.ERROR),
        (Severity.ERROR, logging.ERROR),
        (Severity.WARNING, logging.WARNING),
        (Severity.INFO, logging.DEBUG),
        (Severity.VERBOSE, logging.DEBUG),
    ],
)
def test_a_line_is_logged_at_its_level(
    module: StandInTensorrt, severity: Severity, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    TrtLog(module.library).logger.log(severity, "some\n  news")
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (level, "tensorrt: some news")
    ]


def test_the_reminder_of_64_bits_is_no_warning(
    module: StandInTensorrt, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    TrtLog(module.library).logger.log(Severity.WARNING, "Make sure input input_ids has Int64 binding.")
    assert caplog.records == []


@pytest.mark.parametrize(
    "text",
    ["[onnx] Unused Input: lengths", "Profile 1 is inconsistent with the network's dimensions"],
)
def test_a_warning_after_which_a_plan_is_no_good_is_kept(module: StandInTensorrt, text: str) -> None:
    log = TrtLog(module.library)
    log.logger.log(Severity.WARNING, "Slow, but sound")
    log.logger.log(Severity.WARNING, text)
    assert log.refusals == [text]
    log.clear()
    assert log.refusals == []


def test_an_exception_quotes_the_last_errors_once_each(module: StandInTensorrt) -> None:
    log = TrtLog(module.library)
    assert log.quote() == ""
    for text in ("first", "second", "third", "third", "fourth"):
        log.logger.log(Severity.ERROR, text)
    assert log.quote() == " (tensorrt says: third; fourth)"
    log.clear()
    assert log.quote() == ""


def test_a_thread_quotes_its_own_errors_before_those_of_others(module: StandInTensorrt) -> None:
    log = TrtLog(module.library)
    other = threading.Thread(target=log.logger.log, args=(Severity.ERROR, "of another context"))
    other.start()
    other.join()
    assert log.quote() == " (tensorrt says: of another context)"
    log.logger.log(Severity.ERROR, "of this one")
    assert log.quote() == " (tensorrt says: of this one)"


def test_all_logs_of_a_library_share_its_one_logger(module: StandInTensorrt) -> None:
    first, second = TrtLog(module.library), TrtLog(module.library)
    assert first.logger is second.logger
    second.logger.log(Severity.ERROR, "failed")
    assert first.quote() == second.quote() != ""


def test_nothing_is_held_of_a_library_that_is_no_longer_used() -> None:
    module = StandInTensorrt(StandInCuda())
    gone, log = ref(module), TrtLog(module.library)
    logger = log.logger
    del module, log
    gc.collect()
    assert gone() is not None  # what was made with the logger may still log
    del logger
    gc.collect()
    assert gone() is None
