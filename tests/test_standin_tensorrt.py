# ruff: noqa: ARG002, ARG005
"""What the TensorRT stand-in refuses, and that it computes what the graph says."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from engines.cuda_api import CudaDeviceLostError, Device, Stream
from engines.trt_library import TENSORRT, TENSORRT_RTX, TrtLog
from tests.standins import trt_builder, trt_execution, trt_names, trt_network, trt_runtime
from tests.standins.cuda import StandInCuda
from tests.standins.tensorrt import RuleBrokenError, StandInTensorrt

CELLS, WIDTH = 64, 16


def write_graph(path: Path, *, cells: int | str = CELLS, op: str = "TensorScatter") -> Path:
    """Write a cache update and the sum over the cells of each row."""
    cache: list[str | int] = ["B", 2, cells, WIDTH]
    attributes: dict[str, Any] = {"axis": -2, "mode": "linear"} if op == "TensorScatter" else {}
    nodes = [
        helper.make_node(op, ["cache", "update", "at"], ["new_cache"], "scatter", **attributes),
        helper.make_node("ReduceSum", ["new_cache", "axis"], ["sum"], "sum", keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("cache", TensorProto.FLOAT, cache),
            helper.make_tensor_value_info("update", TensorProto.FLOAT, ["B", 2, "S", WIDTH]),
            helper.make_tensor_value_info("at", TensorProto.INT64, ["B"]),
        ],
        [
            helper.make_tensor_value_info("new_cache", TensorProto.FLOAT, cache),
            helper.make_tensor_value_info("sum", TensorProto.FLOAT, ["B", 2, WIDTH]),
        ],
        [onnx.numpy_helper.from_array(np.array([2]), "axis")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    path.write_bytes(model.SerializeToString())
    return path


class Bench:
    """A GPU, a library, and what it takes to run a plan by hand."""

    def __init__(self, folder: Path, name: str = TENSORRT, *, lazy: bool = False) -> None:
        self.folder = folder
        self.cuda = StandInCuda(lazy=lazy)
        self.trt = StandInTensorrt(self.cuda, name)
        self.log = TrtLog(self.trt.library)
        self.owner = ExitStack()
        self.device: Device = self.cuda.open_device(0)
        self.owner.callback(self.device.close)
        self.owner.enter_context(self.device.activate())
        self.stream: Stream = self.device.stream()
        self.owner.callback(self.stream.close)
        self.addresses: dict[str, int] = {}

    def network(self, path: Path) -> tuple[Any, Any, Any]:
        builder = self.trt.Builder(self.log.logger)
        network = builder.create_network(0)
        parser = self.trt.OnnxParser(network, self.log.logger)
        return builder, network, parser if parser.parse_from_file(str(path)) else None

    def plan(self, *, profiles: tuple[tuple[int, int], ...] = ((1, 8), (4, 1))) -> Any:
        builder, network, _ = self.network(write_graph(self.folder / "g.onnx"))
        config = builder.create_builder_config()
        for rows, tokens in profiles:
            profile = builder.create_optimization_profile()
            profile.set_shape("cache", (1, 2, CELLS, WIDTH), *[(rows, 2, CELLS, WIDTH)] * 2)
            profile.set_shape("update", (1, 2, 1, WIDTH), *[(rows, 2, tokens, WIDTH)] * 2)
            profile.set_shape("at", (1,), (rows,), (rows,))
            assert config.add_optimization_profile(profile) >= 0
        return builder.build_serialized_network(network, config)

    def engine(self, plan: Any = None) -> Any:
        runtime = self.trt.Runtime(self.log.logger)
        return runtime.deserialize_cuda_engine(self.plan() if plan is None else plan)

    def context(self) -> Any:
        """A context of a new engine, with memory and addresses, but no shapes."""
        engine = self.engine()
        context = engine.create_execution_context(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        scratch = self.take(engine.device_memory_size_v2 + 512)
        context.set_device_memory(scratch + -scratch % 512, engine.device_memory_size_v2)
        sizes = {"cache": 4 * 2 * CELLS * WIDTH * 4, "update": 1 << 14, "at": 256, "sum": 1 << 10}
        self.addresses = {name: self.take(size) for name, size in sizes.items()}
        for name, address in {**self.addresses, "new_cache": self.addresses["cache"]}.items():
            assert context.set_tensor_address(name, address)
        return context

    def shape(self, context: Any, rows: int, tokens: int) -> None:
        assert context.set_input_shape("cache", (rows, 2, CELLS, WIDTH))
        assert context.set_input_shape("update", (rows, 2, tokens, WIDTH))
        assert context.set_input_shape("at", (rows,))

    def run(self, context: Any) -> bool:
        return bool(context.execute_async_v3(self.stream.handle))

    def take(self, num_bytes: int) -> int:
        memory = self.device.allocate(num_bytes)
        self.owner.callback(memory.close)
        return memory.address

    def write(self, name: str, values: Any) -> None:
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.cuda.view(self.addresses[name], len(raw))[:] = raw

    def read(self, name: str, shape: tuple[int, ...]) -> Any:
        self.stream.synchronize()
        return self.cuda.view(self.addresses[name], int(np.prod(shape)) * 4).view(np.float32).reshape(shape)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    with made.owner:
        yield made


def write_run(bench: Bench, rows: int) -> None:
    """Fill the cache with nothing, and the update with as many ones as tokens."""
    bench.write("cache", np.zeros((4, 2, CELLS, WIDTH), np.float32))
    bench.write("update", np.ones((rows, 2, 8 if rows == 1 else 1, WIDTH), np.float32))
    bench.write("at", np.arange(3, 3 + rows))


def test_a_run_computes_the_graph_in_place(bench: Bench) -> None:
    context = bench.context()
    write_run(bench, rows=1)
    bench.shape(context, rows=1, tokens=8)
    assert context.infer_shapes() == []
    assert tuple(context.get_tensor_shape("sum")) == (1, 2, WIDTH)
    assert bench.run(context)
    assert (bench.read("sum", (1, 2, WIDTH)) == 8).all()
    cells = bench.read("cache", (1, 2, CELLS, WIDTH)).sum(axis=(0, 1, 3))
    assert np.flatnonzero(cells).tolist() == list(range(3, 11))


def test_the_engine_tells_what_its_tensors_are(bench: Bench) -> None:
    engine, trt = bench.engine(), bench.trt
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    assert names == ["cache", "update", "at", "new_cache", "sum"]
    assert engine.get_tensor_mode("at") == trt.TensorIOMode.INPUT
    assert engine.get_tensor_mode("sum") == trt.TensorIOMode.OUTPUT
    assert engine.get_tensor_mode("nothing") == trt.TensorIOMode.NONE
    assert engine.get_tensor_dtype("at") == trt.DataType.INT64
    assert engine.get_tensor_shape("cache") == (-1, 2, CELLS, WIDTH)
    assert engine.get_tensor_profile_shape("at", 1) == [(1,), (4,), (4,)]
    assert engine.get_aliased_input_tensor("new_cache") == "cache"
    assert engine.get_aliased_input_tensor("sum") is None
    assert engine.num_optimization_profiles == 2


# Refused with False, and a line in the log.

Refusal = Callable[[Bench, Any], bool]


@pytest.mark.parametrize(
    ("try_it", "words"),
    [
        (lambda b, c: c.set_input_shape("cache", (4, 2, CELLS, WIDTH)), "does not satisfy any optimization"),
        (lambda b, c: c.set_input_shape("at", (1, 1)), "does not satisfy any optimization"),
        (lambda b, c: c.set_input_shape("sum", (1, 2, WIDTH)), "invalid tensor name"),
        (lambda b, c: c.set_tensor_address("nothing", 256), "invalid tensor name"),
        (lambda b, c: c.set_tensor_address("at", b.addresses["at"] + 8), "not aligned"),
        (lambda b, c: c.set_optimization_profile_async(2, b.stream.handle), "out of range"),
        (lambda b, c: b.run(c), "Not all shapes are specified"),
    ],
    ids=["shape", "rank", "output's shape", "name", "alignment", "profile", "no shapes"],
)
def test_what_tensorrt_refuses_is_refused_with_its_words(try_it: Refusal, words: str, bench: Bench) -> None:
    assert try_it(bench, bench.context()) is False
    assert words in bench.log.quote()


def test_an_output_must_be_in_the_place_of_its_input(bench: Bench) -> None:
    context = bench.context()
    bench.shape(context, 1, 8)
    assert context.set_tensor_address("new_cache", bench.take(4 * 2 * CELLS * WIDTH * 4))
    assert not bench.run(context)
    assert "must have the address of cache" in bench.log.quote()


def test_a_dimension_has_one_size(bench: Bench) -> None:
    context = bench.context()
    assert context.set_optimization_profile_async(1, bench.stream.handle)
    bench.shape(context, 3, 1)
    assert context.set_input_shape("at", (2,))
    with pytest.raises(RuntimeError, match="B is 3 and, in at, 2"):
        context.infer_shapes()
    assert not bench.run(context)


def test_another_profile_forgets_the_shapes(bench: Bench) -> None:
    context = bench.context()
    bench.shape(context, 1, 8)
    assert context.set_optimization_profile_async(1, bench.stream.handle)
    assert context.infer_shapes() == ["cache", "update", "at"]
    assert not bench.run(context)


def test_no_address_and_no_memory_are_refused(bench: Bench) -> None:
    engine = bench.engine()
    context = engine.create_execution_context(bench.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    bench.shape(context, 1, 8)
    assert not bench.run(context)
    assert "Address is not set for: cache, update, at, new_cache, sum" in bench.log.quote()
    context.set_device_memory(256, 1 << 30)
    assert "512 byte boundary" in bench.log.quote()


def test_wrong_types_are_refused(bench: Bench) -> None:
    context = bench.context()
    with pytest.raises(TypeError):
        context.set_input_shape("at", np.array([1]))
    with pytest.raises(TypeError, match="is no ILogger"):
        bench.trt.Runtime(bench.log)  # type: ignore[arg-type]


# Forbidden, and not noticed by TensorRT.


def test_the_default_stream_a_second_one_and_a_second_thread_break_a_rule(bench: Bench) -> None:
    context = bench.context()
    bench.shape(context, 1, 8)
    write_run(bench, 1)
    with pytest.raises(RuleBrokenError, match="default stream"):
        context.execute_async_v3(0)
    assert bench.run(context)
    other = bench.device.stream()
    with pytest.raises(RuleBrokenError, match="second stream"):
        context.execute_async_v3(other.handle)
    other.close()
    raised: list[BaseException] = []

    def meddle() -> None:
        try:
            context.set_input_shape("at", (1,))
        except RuleBrokenError as error:
            raised.append(error)

    thread = threading.Thread(target=meddle)
    thread.start()
    thread.join()
    assert len(raised) == 1


def test_an_engine_needs_a_current_device(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    plan = bench.plan()
    bench.owner.close()
    assert bench.engine(plan) is None
    assert "invalid device context" in bench.log.quote()


def test_memory_that_is_gone_is_not_computed_on(bench: Bench) -> None:
    context = bench.context()
    bench.shape(context, 1, 8)
    gone = bench.device.allocate(1 << 14)
    assert context.set_tensor_address("update", gone.address)
    gone.close()
    assert bench.run(context)
    with pytest.raises(CudaDeviceLostError, match="illegal memory access"):
        bench.stream.synchronize()


def test_a_context_that_is_gone_is_not_computed_with(tmp_path: Path) -> None:
    bench = Bench(tmp_path, lazy=True)
    with bench.owner:
        context = bench.context()
        bench.shape(context, 1, 8)
        assert bench.run(context)
        del context
        with pytest.raises(CudaDeviceLostError, match="after the context was gone"):
            bench.stream.synchronize()


# CUDA graphs.


def test_a_run_is_captured_and_replayed(bench: Bench) -> None:
    context = bench.context()
    bench.shape(context, 1, 8)
    write_run(bench, 1)
    assert bench.run(context)
    bench.device.begin_capture(bench.stream)
    assert bench.run(context)
    graph = bench.device.end_capture(bench.stream)
    bench.stream.synchronize()
    bench.write("update", np.full((1, 2, 8, WIDTH), 5, np.float32))
    graph.launch(bench.stream)
    assert (bench.read("sum", (1, 2, WIDTH)) == 40).all()
    graph.close()


def test_a_capture_wants_a_run_before_it(bench: Bench) -> None:
    context = bench.context()
    bench.shape(context, 1, 8)
    bench.device.begin_capture(bench.stream)
    with pytest.raises(RuleBrokenError, match="used once"):
        bench.run(context)
    bench.device.end_capture(bench.stream).close()


def test_a_captured_run_wants_its_context_unchanged(bench: Bench) -> None:
    context = bench.context()
    bench.shape(context, 1, 8)
    write_run(bench, 1)
    assert bench.run(context)
    bench.device.begin_capture(bench.stream)
    assert bench.run(context)
    graph = bench.device.end_capture(bench.stream)
    assert context.set_input_shape("update", (1, 2, 4, WIDTH))
    graph.launch(bench.stream)
    with pytest.raises(CudaDeviceLostError, match="after its context had changed"):
        bench.stream.synchronize()
    graph.close()


# Plans.


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda plan: b"", "empty memory buffer"),
        (lambda plan: b"x" * 99, "magicTag"),
        (lambda plan: plan[:-1], "blobSize"),
        (lambda plan: plan[:-1] + bytes([plan[-1] ^ 1]), "blobSize"),
    ],
    ids=["empty", "foreign", "cut", "changed"],
)
def test_a_plan_that_is_none_is_refused(harm: Callable[[bytes], bytes], words: str, bench: Bench) -> None:
    assert bench.engine(harm(bytes(bench.plan()))) is None
    assert words in bench.log.quote()


def test_a_plan_of_another_version_or_gpu_is_refused(bench: Bench) -> None:
    plan = bench.plan()
    bench.trt.behaviour.target = "another GPU"
    assert bench.engine(plan) is None
    assert "incompatible device" in bench.log.quote()
    bench.trt.behaviour.version = "12"
    assert bench.engine(plan) is None
    assert "not compatible with this version" in bench.log.quote()


def test_what_the_parser_refuses_is_refused(bench: Bench) -> None:
    builder, _, parser = bench.network(bench.folder / "nothing.onnx")
    assert parser is None
    assert bench.network(write_graph(bench.folder / "m.onnx", cells="M"))[2] is None
    assert "must be static" in bench.log.quote()
    assert bench.network(write_graph(bench.folder / "n.onnx", op="TRT_Unknown"))[2] is None
    assert "no importer registered" in bench.log.quote()
    profile = builder.create_optimization_profile()
    profile.set_shape("at", (3,), (2,), (4,))
    assert builder.create_builder_config().add_optimization_profile(profile) == -1
    assert "MIN<=OPT<=MAX" in bench.log.quote()


def test_a_profile_that_lacks_an_input_builds_nothing(bench: Bench) -> None:
    builder, network, _ = bench.network(write_graph(bench.folder / "g.onnx"))
    config = builder.create_builder_config()
    assert builder.build_serialized_network(network, config) is None
    assert "no valid shapes in optimization profile 0" in bench.log.quote()


def test_a_progress_monitor_follows_and_stops_a_build(bench: Bench) -> None:
    seen: list[str] = []

    class Monitor(bench.trt.IProgressMonitor):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            bench.trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            seen.append(f"{phase_name} in {parent_phase}")

        def step_complete(self, phase_name: str, step: int) -> bool:
            return False

        def phase_finish(self, phase_name: str) -> None:
            seen.append(f"end of {phase_name}")

    builder, network, _ = bench.network(write_graph(bench.folder / "g.onnx"))
    config = builder.create_builder_config()
    config.progress_monitor = Monitor()
    profile = builder.create_optimization_profile()
    for name, shape in {"cache": (1, 2, CELLS, WIDTH), "update": (1, 2, 1, WIDTH), "at": (1,)}.items():
        profile.set_shape(name, shape, shape, shape)
    config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is None
    assert "cancelled" in bench.log.quote()
    assert seen[0] == "Building engine in None"
    assert seen[-1] == "end of Building engine"


# Memory.


def test_what_the_library_holds_shows_until_it_is_released(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.owner:
        context = bench.context()
        held = " ".join(bench.cuda.leaks())
        assert "weights" in held
        assert "execution context" in held
        assert (bench.trt.behaviour.num_engines, bench.trt.behaviour.num_contexts) == (1, 1)
        del context
        assert (bench.trt.behaviour.num_engines, bench.trt.behaviour.num_contexts) == (0, 0)
    assert bench.cuda.leaks() == []


def test_weights_need_memory(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.owner:
        plan = bench.plan()
        free, _ = bench.device.memory_info()
        bench.take(free // 256 * 256)
        assert bench.engine(plan) is None
        assert "out of memory" in bench.log.quote()


# The names are the real ones.

MODULES = (trt_builder, trt_execution, trt_names, trt_network, trt_runtime)


@pytest.mark.parametrize(
    "kind",
    [
        "Builder",
        "IBuilderConfig",
        "ICudaEngine",
        "IExecutionContext",
        "IHostMemory",
        "INetworkDefinition",
        "IOptimizationProfile",
        "IRuntimeConfig",
        "ITimingCache",
        "OnnxParser",
        "ParserError",
        "Runtime",
    ],
)
def test_every_name_of_a_class_is_the_real_modules(kind: str) -> None:
    real = pytest.importorskip("tensorrt_rtx")
    own = next(vars(module)[kind] for module in MODULES if hasattr(module, kind))
    parts = {name for name, part in vars(own).items() if callable(part) or isinstance(part, property)}
    assert {name for name in parts if not name.startswith("_")} <= set(dir(getattr(real, kind)))


@pytest.mark.parametrize(
    "kind",
    [
        "BuilderFlag",
        "ComputeCapability",
        "CudaGraphStrategy",
        "DataType",
        "DynamicShapesKernelSpecializationStrategy",
        "EngineStat",
        "ErrorCode",
        "ExecutionContextAllocationStrategy",
        "HardwareCompatibilityLevel",
        "LayerType",
        "MemoryPoolType",
        "NetworkDefinitionCreationFlag",
        "ProfilingVerbosity",
        "TensorIOMode",
        "TensorLocation",
    ],
)
def test_every_member_of_an_enumeration_is_the_real_ones(kind: str, tmp_path: Path) -> None:
    real = pytest.importorskip("tensorrt_rtx")
    own = getattr(Bench(tmp_path, TENSORRT_RTX).trt, kind)
    theirs = {name: int(member) for name, member in getattr(real, kind).__members__.items()}
    for member in own:
        assert theirs[member.name] == int(member)
