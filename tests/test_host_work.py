"""How many calls a step of the TensorRT engines takes; how long they take is measured, not tested."""

from tests.standins import host_work


def test_a_step_of_decode_is_few_calls() -> None:
    with host_work.open_context(cuda_graphs=False) as (rig, context):
        decode, mixed = (
            host_work.measure(rig, context, host_work.KINDS[kind], num_steps=10)
            for kind in ("64 sequences", "63 sequences and a prompt of 64 tokens")
        )
    # Inputs, execution, candidates, mark, wait; and nothing that TensorRT knows already is said again.
    assert (decode.num_cuda_calls, decode.num_tensorrt_calls) == (5, 1)
    assert mixed.num_cuda_calls == 7
