import pytest

from streamsrv.errors import RequestIdInUseError, StoppedError
from streamsrv.sequence import Finish, FinishReason
from streamsrv.stream import OutputEnd, Stream, StreamEnd, StreamLog, StreamRegistry, Token


def tokens(*ids: int) -> list[Token]:
    return [Token(0, token_id, f"t{token_id}") for token_id in ids]


def test_positions_never_change_when_old_elements_are_dropped() -> None:
    log = StreamLog()
    log.append(*tokens(0, 1, 2, 3))
    log.drop_before(2)
    log.append(*tokens(4))
    assert log.oldest_position == 2
    assert log.next_position == 5
    assert log.read(2) == tokens(2, 3, 4)
    assert log.read(3, most=1) == tokens(3)
    assert log.read(5) == []


def test_a_position_that_is_dropped_or_not_there_yet_cannot_be_read() -> None:
    log = StreamLog()
    log.append(*tokens(0, 1))
    log.drop_before(1)
    for position in (0, 3):
        with pytest.raises(AssertionError, match="does not hold"):
            log.read(position)


def test_a_log_ends_once_with_an_end_or_an_error() -> None:
    ended, failed = StreamLog(), StreamLog()
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
    log, wakes = StreamLog(), list[int]()
    log.on_change = lambda: wakes.append(log.next_position)
    log.append(*tokens(1))
    log.append(*tokens(2))
    log.fail(StoppedError())
    assert wakes == [1, 2, 2]


def test_a_request_id_that_lives_is_refused_and_the_first_stream_is_untouched() -> None:
    registry = StreamRegistry()
    first = Stream("a-1", "mine", 1, StreamLog())
    registry.add(first)
    with pytest.raises(RequestIdInUseError, match="a-1"):
        registry.add(Stream("a-2", "mine", 2, StreamLog()))
    assert registry.by_request_id("mine") is first
    assert registry.by_stream_id("a-2") is None
    registry.remove(first)
    registry.add(Stream("a-3", "mine", 3, StreamLog()))
    assert len(registry) == 1
