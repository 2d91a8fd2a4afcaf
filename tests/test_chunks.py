import os
from collections.abc import Sequence as Seq

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from streamsrv.chunks import MAX_RAW_BYTES, MAX_TOKENS_PER_MESSAGE, ChunkDecoder, ChunkEncoder
from streamsrv.errors import StreamCorruptError
from streamsrv.request import Codec, OutputOptions
from streamsrv.sequence import Finish, FinishReason
from streamsrv.stream import Element, OutputEnd, StreamEnd, Token
from streamsrv.v1 import inference_pb2 as pb


class Encoder(ChunkEncoder):
    def message(self, position: int, elements: Seq[Element]) -> pb.GenerateResponse:
        return pb.GenerateResponse.FromString(self.encode(position, elements))


def start(seq: int = 0) -> pb.GenerateResponse:
    return pb.GenerateResponse(stream_id="s", seq=seq, start=pb.StreamStart())


def flatten(events: pb.EventList) -> list[tuple[object, ...]]:
    """The events as positions' worth of plain values, so that chunkings can be compared."""
    flat: list[tuple[object, ...]] = []
    for event in events.events:
        kind = event.WhichOneof("kind")
        if kind == "tokens":
            run, at = event.tokens, 0
            data = run.text.encode()
            for token_id, size in zip(run.token_ids, run.text_lengths, strict=True):
                flat.append((run.output_index, token_id, data[at : at + size].decode()))
                at += size
            assert at == len(data)
        else:
            flat.append((kind, event.SerializeToString()))
    return flat


tokens = st.builds(Token, st.integers(0, 2), st.integers(0, 50_000), st.text(max_size=8))
ends = st.builds(
    OutputEnd,
    st.integers(0, 2),
    st.builds(
        Finish, st.sampled_from(FinishReason), st.none() | st.integers(0, 9) | st.text(min_size=1), st.text()
    ),
)
elements_strategy = st.lists(tokens | ends, min_size=1, max_size=40)


@given(elements_strategy, st.lists(st.integers(1, 9), min_size=1, max_size=40), st.sampled_from(Codec))
def test_any_chunking_says_the_same_at_the_same_positions(
    elements: list[Element], sizes: list[int], codec: Codec
) -> None:
    elements = [*elements, StreamEnd(3, 7)]
    output = OutputOptions(text_lengths=True)
    whole = ChunkDecoder()
    whole.decode(start())
    expected = flatten(whole.decode(Encoder("s", Codec.PLAIN, output).message(0, elements)))
    encoder, decoder = Encoder("s", codec, output), ChunkDecoder()
    decoder.decode(start())
    received, position, turn = [], 0, 0
    while position < len(elements):
        piece = elements[position : position + sizes[turn % len(sizes)]]
        received += flatten(decoder.decode(encoder.message(position, piece)))
        position += len(piece)
        turn += 1
        assert decoder.next_position == position
    assert received == expected


def test_adjacent_tokens_of_one_output_are_one_run_and_nothing_is_reordered() -> None:
    elements: list[Element] = [Token(0, 1, "a"), Token(0, 2, "b"), Token(1, 3, "c"), Token(0, 4, "d")]
    message = Encoder("s", Codec.PLAIN, OutputOptions()).message(5, elements)
    runs = [(e.tokens.output_index, list(e.tokens.token_ids), e.tokens.text) for e in message.events.events]
    assert runs == [(0, [1, 2], "ab"), (1, [3], "c"), (0, [4], "d")]
    assert message.seq == 5
    assert message.events.events[0].num_positions == 2
    assert not message.events.events[1].HasField("num_positions")


def test_what_was_not_asked_for_is_not_sent() -> None:
    elements: list[Element] = [Token(0, 1, "a"), OutputEnd(0, Finish(FinishReason.STOP, 1, "held"))]
    message = Encoder("s", Codec.PLAIN, OutputOptions(text=False, text_lengths=True)).message(0, elements)
    run, end = message.events.events[0].tokens, message.events.events[1].output_end
    assert (run.text, list(run.text_lengths), list(run.token_ids), end.text) == ("", [], [1], "")
    message = Encoder("s", Codec.PLAIN, OutputOptions(token_ids=False)).message(0, elements)
    assert list(message.events.events[0].tokens.token_ids) == []


def test_small_messages_go_plain_and_never_enter_the_zstd_frame() -> None:
    encoder, decoder = Encoder("s", Codec.ZSTD, OutputOptions()), ChunkDecoder()
    decoder.decode(start())
    kinds = []
    for i in range(20):
        text = "" if i % 2 else "a longer piece of text, which is worth compressing " * 3
        message = encoder.message(i, [Token(0, 5, text)])
        kinds.append(message.WhichOneof("payload"))
        assert decoder.decode(message).events[0].tokens.text == text
    assert kinds == ["zstd_events", "events"] * 10


def test_one_frame_serves_the_whole_call() -> None:
    encoder = Encoder("s", Codec.ZSTD, OutputOptions())
    sizes = [
        len(encoder.message(i, [Token(0, 5, "the same words again and again " * 4)]).zstd_events)
        for i in range(4)
    ]
    assert max(sizes[1:]) < sizes[0]


def test_a_gap_or_a_repetition_is_noticed() -> None:
    encoder = Encoder("s", Codec.PLAIN, OutputOptions())
    for seq in (1, 3):
        decoder = ChunkDecoder()
        decoder.decode(start())
        decoder.decode(encoder.message(0, [Token(0, 1, "a"), Token(0, 2, "b")]))
        with pytest.raises(StreamCorruptError, match="expected 2"):
            decoder.decode(encoder.message(seq, [Token(0, 3, "c")]))


def test_a_kind_that_is_not_known_takes_its_positions() -> None:
    decoder = ChunkDecoder()
    decoder.decode(start(seq=7))
    later = pb.GenerateResponse(stream_id="s", seq=7, events=pb.EventList(events=[pb.Event(num_positions=3)]))
    decoder.decode(later)
    assert decoder.next_position == 10


def test_a_bomb_is_refused_before_it_fills_the_memory() -> None:
    compressor = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=17)
    ).compressobj()
    bomb = compressor.compress(bytes(300 << 20)) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    assert len(bomb) < 1 << 20
    decoder = ChunkDecoder()
    decoder.decode(start())
    with pytest.raises(StreamCorruptError, match="more than"):
        decoder.decode(pb.GenerateResponse(stream_id="s", seq=0, zstd_events=bomb))


def test_a_call_that_does_not_begin_with_a_start_or_begins_twice_is_noticed() -> None:
    decoder = ChunkDecoder()
    with pytest.raises(StreamCorruptError, match="does not begin"):
        decoder.decode(pb.GenerateResponse(stream_id="s", events=pb.EventList()))
    decoder = ChunkDecoder()
    decoder.decode(start())
    with pytest.raises(StreamCorruptError, match="second StreamStart"):
        decoder.decode(start())


def test_a_call_must_begin_at_the_position_that_was_wanted() -> None:
    decoder = ChunkDecoder(7)
    assert decoder.next_position == 7
    decoder.decode(start(seq=7))
    with pytest.raises(StreamCorruptError, match="jumped to position 6, expected 7"):
        ChunkDecoder(7).decode(start(seq=6))


def test_compressed_garbage_is_an_error_of_the_stream() -> None:
    compressor = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=12)
    ).compressobj()
    data = compressor.compress(b"\xff" * 20) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    decoder = ChunkDecoder()
    decoder.decode(start())
    with pytest.raises(StreamCorruptError, match="holds no events"):
        decoder.decode(pb.GenerateResponse(stream_id="s", seq=0, zstd_events=data))


@pytest.mark.parametrize("data", [b"not zstd", os.urandom(100)])
def test_garbage_for_a_frame_is_an_error_of_the_stream(data: bytes) -> None:
    decoder = ChunkDecoder()
    decoder.decode(start())
    with pytest.raises(StreamCorruptError, match="cannot be decompressed"):
        decoder.decode(pb.GenerateResponse(stream_id="s", seq=0, zstd_events=data))


def test_a_window_larger_than_the_contract_allows_is_refused() -> None:
    compressor = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=20)
    ).compressobj()
    data = compressor.compress(os.urandom(1000)) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    decoder = ChunkDecoder()
    decoder.decode(start())
    with pytest.raises(StreamCorruptError, match="cannot be decompressed"):
        decoder.decode(pb.GenerateResponse(stream_id="s", seq=0, zstd_events=data))


def test_the_largest_message_stays_within_the_contract() -> None:
    elements: list[Element] = [Token(0, 2**32 - 1, "\U0001f600" * 64)] * MAX_TOKENS_PER_MESSAGE
    message = Encoder("s", Codec.PLAIN, OutputOptions(text_lengths=True)).message(0, elements)
    assert message.events.ByteSize() <= MAX_RAW_BYTES
