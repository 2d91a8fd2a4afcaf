from hypothesis import given
from hypothesis import strategies as st

from streamsrv.request import OutputOptions
from streamsrv.serialised import EVENTS_TAG, ZSTD_EVENTS_TAG, one_token, response
from streamsrv.stream import Token
from streamsrv.v1 import inference_pb2 as pb


@given(
    st.integers(0, 200),
    st.integers(0, 2**32 - 1),
    st.text(max_size=200),
    st.builds(OutputOptions, text=st.booleans(), token_ids=st.booleans(), text_lengths=st.booleans()),
)
def test_a_tokens_bytes_are_those_of_the_generated_classes(
    output_index: int, token_id: int, text: str, output: OutputOptions
) -> None:
    event = pb.Event()
    event.tokens.output_index = output_index
    if output.token_ids:
        event.tokens.token_ids.append(token_id)
    if output.text:
        event.tokens.text = text
        if output.text_lengths:
            event.tokens.text_lengths.append(len(text.encode()))
    events = pb.EventList(events=[event])
    assert one_token(Token(output_index, token_id, text), output) == events.SerializeToString()


@given(st.text(max_size=40), st.integers(0, 2**32 - 1), st.binary(max_size=300))
def test_a_responses_bytes_are_those_of_the_generated_classes(
    stream_id: str, position: int, data: bytes
) -> None:
    head = pb.GenerateResponse(stream_id=stream_id).SerializeToString()
    zstd = pb.GenerateResponse(stream_id=stream_id, seq=position, zstd_events=data)
    assert response(head, position, ZSTD_EVENTS_TAG, data) == zstd.SerializeToString()
    plain = pb.GenerateResponse(stream_id=stream_id, seq=position, events=pb.EventList(events=[pb.Event()]))
    assert response(head, position, EVENTS_TAG, b"\n\0") == plain.SerializeToString()
