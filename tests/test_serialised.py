from hypothesis import given
from hypothesis import strategies as st

from streamsrv.request import OutputOptions
from streamsrv.serialised import EVENTS_TAG, ZSTD_EVENTS_TAG, response, token_run
from streamsrv.v1 import inference_pb2 as pb


@given(
    st.integers(0, 200),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200),
    st.text(max_size=200),
    st.lists(st.integers(0, 2**20), max_size=9),
    st.builds(OutputOptions, text=st.booleans(), token_ids=st.booleans()),
)
def test_a_runs_bytes_are_those_of_the_generated_classes(
    output_index: int, token_ids: list[int], text: str, text_lengths: list[int], output: OutputOptions
) -> None:
    event, logprobs = pb.Event(), pb.TokenRun(logprobs=[-1.5], top_logprobs=[pb.TopLogprobs(token_ids=[3])])
    if len(token_ids) > 1:
        event.num_positions = len(token_ids)
    event.tokens.CopyFrom(logprobs)
    event.tokens.output_index = output_index
    if output.token_ids:
        event.tokens.token_ids.extend(token_ids)
    if output.text:
        event.tokens.text = text
        event.tokens.text_lengths.extend(text_lengths)
    run = token_run(output, output_index, token_ids, text, text_lengths, logprobs.SerializeToString())
    assert run == pb.EventList(events=[event]).SerializeToString()


@given(st.text(max_size=40), st.integers(0, 2**32 - 1), st.binary(max_size=300))
def test_a_responses_bytes_are_those_of_the_generated_classes(
    stream_id: str, position: int, data: bytes
) -> None:
    head = pb.GenerateResponse(stream_id=stream_id).SerializeToString()
    zstd = pb.GenerateResponse(stream_id=stream_id, seq=position, zstd_events=data)
    assert response(head, position, ZSTD_EVENTS_TAG, data) == zstd.SerializeToString()
    plain = pb.GenerateResponse(stream_id=stream_id, seq=position, events=pb.EventList(events=[pb.Event()]))
    assert response(head, position, EVENTS_TAG, b"\n\0") == plain.SerializeToString()
