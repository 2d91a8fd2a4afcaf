from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamsrv.detokenizer import Detokenizer
from streamsrv.errors import (
    PositionEvictedError,
    PositionInFutureError,
    RequestIdInUseError,
    StoppedError,
)
from streamsrv.request import OutputOptions
from streamsrv.sequence import Finish, FinishReason
from streamsrv.stream import (
    Caller,
    LogMemory,
    OutputEnd,
    Stream,
    StreamEnd,
    StreamLog,
    StreamRegistry,
    Token,
    TokenRun,
)
from tests import vocabularies

byte_level = cache(vocabularies.byte_level)


def tokens(*ids: int) -> list[Token]:
    return [Token(0, token_id, f"t{token_id}") for token_id in ids]


def test_positions_never_change_when_old_elements_are_dropped() -> None:
    log = StreamLog(LogMemory(1 << 20))
    log.append(*tokens(0, 1, 2, 3))
    log.drop_before(2)
    log.append(*tokens(4))
    assert log.oldest_position == 2
    assert log.next_position == 5
    assert log.read(2) == tokens(2, 3, 4)
    assert log.read(3, most=1) == tokens(3)
    assert log.read(5) == []


def test_a_position_that_is_dropped_or_not_there_yet_cannot_be_read() -> None:
    log = StreamLog(LogMemory(1 << 20))
    log.append(*tokens(0, 1))
    log.drop_before(1)
    for position in (0, 3):
        with pytest.raises(AssertionError, match="does not hold"):
            log.read(position)


def test_a_log_ends_once_with_an_end_or_an_error() -> None:
    ended, failed = StreamLog(LogMemory(1 << 20)), StreamLog(LogMemory(1 << 20))
    ended.append(OutputEnd(0, Finish(FinishReason.STOP)), StreamEnd(1, 1))
    failed.fail(StoppedError())
    for log in (ended, failed):
        assert log.ended
        with pytest.raises(AssertionError, match="after its end"):
            log.append(*tokens(1))
        with pytest.raises(AssertionError, match="twice"):
            log.fail(StoppedError())
    assert isinstance(failed.error, StoppedError)


def test_a_reader_is_woken_by_every_change() -> None:
    log, wakes = StreamLog(LogMemory(1 << 20)), list[int]()
    log.on_change = lambda: wakes.append(log.next_position)
    log.append(*tokens(1))
    log.append(*tokens(2))
    log.fail(StoppedError())
    assert wakes == [1, 2, 2]


ME = Caller("me")


def make_stream(
    stream_id: str,
    request_id: str,
    window_s: float = 0.0,
    memory: LogMemory | None = None,
    caller: Caller = ME,
) -> Stream:
    return Stream(
        stream_id,
        request_id,
        StreamLog(memory or LogMemory(1 << 20)),
        caller=caller,
        output=OutputOptions(),
        num_prompt_tokens=1,
        resume_window_s=window_s,
    )


def test_a_request_id_that_lives_is_refused_and_the_first_stream_is_untouched() -> None:
    registry = StreamRegistry()
    first = make_stream("a-1", "mine")
    registry.add(first)
    with pytest.raises(RequestIdInUseError, match="a-1"):
        registry.add(make_stream("a-2", "mine"))
    assert registry.by_request_id(ME, "mine") is first
    assert registry.by_stream_id("a-2") is None
    registry.remove(first)
    registry.add(make_stream("a-3", "mine"))
    assert len(registry) == 1


def test_an_authenticated_callers_request_ids_are_its_own_and_all_others_share_theirs() -> None:
    registry = StreamRegistry()
    callers = [Caller("alice", authenticated=True), Caller("bob", authenticated=True), Caller("alice")]
    for i, caller in enumerate(callers):
        registry.add(make_stream(f"a-{i}", "mine", caller=caller))
    with pytest.raises(RequestIdInUseError, match="a-2"):
        registry.add(make_stream("a-9", "mine", caller=Caller("another address")))
    for i, caller in enumerate(callers):
        stream = registry.by_request_id(caller, "mine")
        assert stream is not None
        assert stream.stream_id == f"a-{i}"
        registry.remove(stream)
        assert registry.by_request_id(caller, "mine") is None


def test_what_was_taken_is_kept_only_where_it_can_be_resumed() -> None:
    for window_s, oldest in ((0.0, 3), (10.0, 0)):
        stream = make_stream("a-1", "mine", window_s)
        reader = stream.attach(0, lambda: None)
        stream.log.append(*tokens(0, 1, 2, 3))
        assert reader.take(3) == tokens(0, 1, 2)
        assert stream.log.oldest_position == oldest
        assert reader.take(3) == tokens(3)
        assert reader.take(3) == []


def test_a_second_reader_replaces_the_first_which_is_woken_to_notice() -> None:
    stream, woken = make_stream("a-1", "mine", 10.0), list[str]()
    stream.log.append(*tokens(0, 1))
    first = stream.attach(0, lambda: woken.append("first"))
    first.take(2)
    second = stream.attach(1, lambda: woken.append("second"))
    assert (first.replaced, second.replaced, woken) == (True, False, ["first"])
    stream.log.append(*tokens(2))
    assert woken == ["first", "second"]
    assert second.take(9) == tokens(1, 2)
    assert not stream.detach(first)
    assert stream.reader is second
    assert stream.detach(second)
    assert stream.reader is None


def test_a_quiet_log_wakes_by_its_end_and_a_new_reader_by_all() -> None:
    stream, woken = make_stream("a-1", "mine", 10.0), list[int]()
    stream.attach(0, lambda: woken.append(1))
    stream.log.is_quiet = True
    stream.log.append(*tokens(0))
    stream.log.append_ids([1])
    assert woken == []
    stream.attach(0, lambda: woken.append(2))
    stream.log.append_ids([1])
    stream.log.is_quiet = True
    stream.log.append(StreamEnd(1, 3))
    assert woken == [1, 2, 2]


@given(st.data(), st.lists(st.integers(0, 400), min_size=1, max_size=30))
def test_bare_ids_say_from_any_position_what_tokens_with_their_texts_say(
    data: st.DataObject, ids: list[int]
) -> None:
    tokenizer = byte_level()
    plain, eager = (make_stream("a-1", "mine", 10.0) for _ in range(2))
    plain.log.detokenizer, detokenizer = Detokenizer(tokenizer), Detokenizer(tokenizer)
    plain.log.append_ids(ids)
    plain.log.append(OutputEnd(0, Finish(FinishReason.STOP, 5)), StreamEnd(1, len(ids)))
    eager.log.append(*(Token(0, token_id, detokenizer.push(token_id)) for token_id in ids))
    eager.log.append(OutputEnd(0, Finish(FinishReason.STOP, 5, detokenizer.flush())), StreamEnd(1, len(ids)))
    for _ in range(3):
        position = data.draw(st.integers(plain.log.oldest_position, len(ids)))
        readers = [stream.attach(position, lambda: None) for stream in (plain, eager)]
        most = data.draw(st.integers(1, 9))
        for _ in range(data.draw(st.integers(0, 30))):
            told, expected = (reader.take(most) for reader in readers)
            assert readers[0].position == readers[1].position
            assert [e for e in told if not isinstance(e, TokenRun)] == [
                e for e in expected if not isinstance(e, Token)
            ]
            runs = [e for e in told if isinstance(e, TokenRun)]
            texts = [e for e in expected if isinstance(e, Token)]
            assert [i for run in runs for i in run.token_ids] == [token.token_id for token in texts]
            assert "".join(run.text for run in runs) == "".join(token.text for token in texts)
        dropped = data.draw(st.integers(plain.log.oldest_position, len(ids)))
        plain.log.drop_before(dropped)
        eager.log.drop_before(dropped)


def test_a_position_that_is_not_held_is_refused_with_what_is() -> None:
    stream = make_stream("a-1", "mine", 10.0)
    stream.log.append(*tokens(0, 1, 2))
    stream.log.drop_before(1)
    with pytest.raises(PositionEvictedError, match="oldest is 1"):
        stream.attach(0, lambda: None)
    with pytest.raises(PositionInFutureError, match="goes on at 3"):
        stream.attach(4, lambda: None)
    assert stream.attach(3, lambda: None).take(1) == []


def test_a_stream_is_delivered_when_all_is_taken_and_the_reader_has_gone() -> None:
    stream = make_stream("a-1", "mine", 10.0)
    reader = stream.attach(0, lambda: None)
    stream.log.append(*tokens(0), StreamEnd(1, 1))
    reader.take(1)
    stream.detach(reader)
    assert not stream.is_delivered
    reader = stream.attach(1, lambda: None)
    reader.take(5)
    assert reader.at_end
    assert not stream.is_delivered
    stream.detach(reader)
    assert stream.is_delivered


def test_the_memory_of_all_logs_is_counted_to_the_last_byte() -> None:
    memory = LogMemory(1000)
    registry = StreamRegistry()
    streams = [make_stream(f"a-{i}", f"r{i}", 10.0, memory) for i in range(3)]
    for i, stream in enumerate(streams):
        registry.add(stream)
        stream.log.append(*tokens(*range(i + 1)))
    assert memory.used_bytes == sum(stream.log.size_bytes for stream in streams) > 0
    streams[2].log.drop_before(2)
    assert memory.used_bytes == sum(stream.log.size_bytes for stream in streams)
    for stream in streams:
        registry.remove(stream)
        stream.log.append(*tokens(9))
        assert stream.log.next_position == stream.log.oldest_position
    assert memory.used_bytes == 0
    assert not memory.is_full
