"""Every name, argument and enumeration that we use of TensorRT exists in its real bindings."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engines import trt_graph, trt_interface
from tests import trt_uses
from tests.trt_uses import check, check_engines

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def rtx() -> Any:
    return pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed; see the README")


def test_tensorrt_rtx_has_everything_that_we_use(rtx: ModuleType) -> None:
    report = check_engines(rtx)
    assert report.faults == []
    assert report.num_uses > 100


def test_tensorrt_has_everything_that_we_use_where_it_is_installed() -> None:
    trt = pytest.importorskip("tensorrt", reason="tensorrt is not installed; it needs NVIDIA's own index")
    report = check_engines(trt)
    assert report.faults == []
    assert report.num_uses > 100


LIBRARIES = ("libnvinfer.so.11", "libnvinfer_plugin.so.11", "libnvonnxparser.so.11")
ENTRIES = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)
"""What the bindings import from TensorRT's libraries: functions that are never called here."""


@pytest.mark.slow
def test_tensorrts_own_bindings_have_everything_that_we_use(tmp_path: Path) -> None:
    """The bindings are a wheel of their own, which is importable once its libraries' names are there."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler for the libraries' names")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    fetched = subprocess.run(
        [*pip, "--dest", str(tmp_path), "tensorrt-cu13-bindings==11.4.*"],
        capture_output=True,
        text=True,
        check=False,
    )
    if fetched.returncode != 0:
        pytest.skip(f"the wheel of TensorRT's bindings cannot be had: {fetched.stderr.strip()[-200:]}")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    source = tmp_path / "names.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in ENTRIES))
    for library in LIBRARIES:
        made = tmp_path / "tensorrt_bindings" / library
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    # Apart from this process, which may have the other library's bindings.
    program = (
        "import json, tensorrt_bindings; from tests.trt_uses import check_engines; "
        "report = check_engines(tensorrt_bindings); print(json.dumps([report.faults, report.num_uses]))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    faults, num_uses = json.loads(answer.stdout)
    assert faults == []
    assert num_uses > 100


def test_every_type_that_is_asked_for_by_its_name_is_in_the_check() -> None:
    asked = {*trt_graph._KINDS.values(), *trt_interface._TYPE_NAMES.values()}
    assert asked <= set(trt_uses.BY_NAME["DataType"])


# The check itself: it must not be silent about what it does not understand.


def faults_of(rtx: ModuleType, body: str, parameters: str = "trt: Any, builder: Any, config: Any") -> str:
    lines = "\n    ".join(body.splitlines())
    return "; ".join(check(rtx, f"def run({parameters}) -> None:\n    {lines}\n").faults)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("trt.Bulider(log)", "tensorrt_rtx has no MODULE.Bulider"),
        ("trt.DataType.FLOAT16", "has no class:DataType.FLOAT16"),
        ("builder.create_netwerk(0)", "has no Builder.create_netwerk"),
        ("builder.create_network(0, 1)", "Builder.create_network takes [['flags']], not 2 and []"),
        ("builder.create_network(flag=0)", "takes [['flags']], not 0 and ['flag']"),
        ("builder.build_serialized_network(x)", "takes [['network', 'config']], not 1"),
        ("config.max_workspace_size = 1", "has no IBuilderConfig.max_workspace_size"),
        ("config.num_optimization_profiles = 1", "IBuilderConfig.num_optimization_profiles cannot be set"),
        ("net = builder.create_network(0)\nnet.get_inputs()", "has no INetworkDefinition.get_inputs"),
        ("for t in [builder.create_network(0).get_input(i) for i in x]:\n    t.nam", "has no ITensor.nam"),
        ("both = [trt.Builder(log), trt.Runtime(log)]\nboth[0].logger", "cannot tell whose .logger this is"),
        ("things = {1: trt.Builder(log)}\nthings[1].logger", "cannot tell whose .logger this is"),
        ("getattr(trt.LayerType, name)", "say in BY_NAME which members of LayerType"),
        ("self.thing = trt.Runtime(log)", "self.thing is a Runtime: say so in ATTRIBUTES"),
        ("self.thing: Any = make()", "thing is Any: say in ATTRIBUTES what it is"),
        ("thing: Any = make()\nthing.run()", "cannot tell whose .run this is"),
        ("with make():\n    if x:\n        builder.reste()", "has no Builder.reste"),
        ("try:\n    pass\nfinally:\n    builder.reste()", "has no Builder.reste"),
        ("x = 1 if builder.reste else [f'{builder.other}']", "has no Builder.reste"),
        ("class L(trt.ILogger):\n    def log(self, message): ...", "ILogger.log takes [['severity', 'msg']]"),
        ("class L(trt.ILogger):\n    def write(self, message): ...", "has no ILogger.write"),
    ],
)
def test_the_check_finds(rtx: ModuleType, body: str, fault: str) -> None:
    assert fault in faults_of(rtx, body)


def test_the_check_wants_to_know_what_every_any_is(rtx: ModuleType) -> None:
    assert "thing is Any: say in PARAMETERS" in faults_of(rtx, "thing.run()", "thing: Any")
    source = "def make() -> Any:\n    return x\nclass C:\n    field: Any\n"
    assert check(rtx, source).faults == [
        "source:1: make returns Any: say in RETURNS what it is",
        "source:4: field is Any: say in ATTRIBUTES what it is",
    ]


def test_the_check_takes_what_is_right(rtx: ModuleType) -> None:
    body = """\
network = builder.create_network(flags=0)
kinds = [network.get_layer(i).type for i in range(network.num_layers)]
kinds.count(trt.LayerType.KV_CACHE_UPDATE)
config.max_aux_streams = 0
config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 1)
plan = builder.build_serialized_network(network, config)
memoryview(plan).cast("B")
"""
    assert faults_of(rtx, body) == ""
