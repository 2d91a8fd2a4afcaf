"""The client's decisions, against a server that is a dictionary and a network that is a list of faults."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamsrv.chat import ToolCall
from streamsrv.chunks import ChunkEncoder
from streamsrv.client import Chunk, make_request
from streamsrv.client.follower import Follower, FollowState, GiveUp, NextCall
from streamsrv.client.request import make_resumable
from streamsrv.errors import CallFailedError, StreamCorruptError, StreamIncompleteError
from streamsrv.request import Codec, OutputOptions
from streamsrv.sequence import Finish, FinishReason
from streamsrv.stream import Element, OutputEnd, PromptTokens, StreamEnd, Token, ToolCallMade
from streamsrv.v1 import inference_pb2 as pb

LOG: list[Element] = [Token(0, 10 + i, f"word{i} ") for i in range(30)]
LOG += [OutputEnd(0, Finish(FinishReason.STOP, matched=2, text="!")), StreamEnd(3, 30)]
TEXT = "".join(element.text for element in LOG if isinstance(element, Token)) + "!"
IDS = tuple(element.token_id for element in LOG if isinstance(element, Token))
WINDOW_S = 10.0

BROKEN = CallFailedError("UNAVAILABLE", "Socket closed")


def refused(code: str, reason: str, retry_after_s: float | None = None) -> CallFailedError:
    return CallFailedError(code, "no", server_reason=reason, retry_after_s=retry_after_s)


NOT_FOUND = refused("NOT_FOUND", "STREAM_NOT_FOUND")
IN_USE = refused("ALREADY_EXISTS", "REQUEST_ID_IN_USE")
BUSY = refused("RESOURCE_EXHAUSTED", "TOO_MANY_WAITING", 1.0)
DRAINING = refused("UNAVAILABLE", "DRAINING", 1.0)
WORKER_LOST = refused("UNAVAILABLE", "WORKER_LOST")
REPLACED = refused("ABORTED", "READER_REPLACED")
STALLED = refused("ABORTED", "CONSUMER_STALLED")


def follower(
    *,
    num_outputs: int | None = None,
    window_s: float = WINDOW_S,
    max_retries: int = 3,
    deadline_s: float | None = None,
    chance: Callable[[], float] = lambda: 0.5,
) -> Follower:
    return Follower(
        make_resumable(make_request("x", num_outputs=num_outputs), window_s),
        max_retries=max_retries,
        began_s=0.0,
        deadline_s=deadline_s,
        random=chance,
    )


def start(position: int = 0, stream_id: str = "s-1", window_s: float = WINDOW_S) -> pb.GenerateResponse:
    begin = pb.StreamStart(resume_token=b"t" * 16, resume_window_ms=round(window_s * 1000))
    return pb.GenerateResponse(stream_id=stream_id, seq=position, start=begin)


def events(position: int, elements: list[Element], stream_id: str = "s-1") -> pb.GenerateResponse:
    return pb.GenerateResponse.FromString(
        ChunkEncoder(stream_id, Codec.PLAIN, OutputOptions()).encode(position, elements)
    )


def reading(num_elements: int = 0, **options: float) -> Follower:
    """One that has received so many elements of the log."""
    machine = follower(**options)  # type: ignore[arg-type]
    machine.begin()
    machine.received(start(window_s=options.get("window_s", WINDOW_S)), 0.0)
    if num_elements:
        machine.received(events(0, LOG[:num_elements]), 0.0)
    return machine


def next_call(step: NextCall | GiveUp | None) -> NextCall:
    assert isinstance(step, NextCall)
    return step


def given_up(step: NextCall | GiveUp | None) -> CallFailedError:
    assert isinstance(step, GiveUp)
    return step.error


# ---------------------------------------------------------------------------------------------------------
# After the first message


def test_a_whole_stream_is_delivered_and_complete() -> None:
    machine = reading()
    chunk = machine.received(events(0, LOG), 2.5)
    assert chunk is not None
    assert (chunk.text, tuple(chunk.token_ids), chunk.num_tokens, chunk.position) == (TEXT, IDS, 30, 0)
    machine.ended()
    assert machine.state is FollowState.COMPLETE
    assert (machine.text, machine.token_ids, machine.position) == (TEXT, IDS, len(LOG))
    assert (machine.outputs[0].finish_reason, machine.outputs[0].matched, machine.first_token_s) == (
        "STOP",
        2,
        2.5,
    )
    assert machine.usage == pb.Usage(num_prompt_tokens=3, num_completion_tokens=30)
    assert (machine.num_resumes, machine.num_resends) == (0, 0)


def test_a_broken_call_is_resumed_from_the_next_position_with_the_token() -> None:
    machine = reading(7)
    step = next_call(machine.failed(BROKEN, 1.0))
    assert isinstance(step.request, pb.ResumeRequest)
    assert step.request.stream_id == "s-1"
    assert step.request.resume_token == b"t" * 16
    assert step.request.position == 7
    assert step.request.stream.accepted_codecs == [pb.CODEC_ZSTD]
    assert machine.received(start(7), 1.2) is None
    machine.received(events(7, LOG[7:]), 1.3)
    machine.ended()
    assert (machine.text, machine.token_ids, machine.num_resumes) == (TEXT, IDS, 1)


@pytest.mark.parametrize("position", [6, 8])
def test_a_resumed_call_that_begins_elsewhere_is_noticed(position: int) -> None:
    machine = reading(7)
    machine.failed(BROKEN, 1.0)
    with pytest.raises(StreamCorruptError, match="expected 7"):
        machine.received(start(position), 1.2)


def test_a_message_of_another_stream_is_noticed() -> None:
    machine = reading(7)
    with pytest.raises(StreamCorruptError, match="s-2"):
        machine.received(events(7, LOG[7:9], "s-2"), 1.0)


def test_a_resumed_call_that_repeats_a_message_is_noticed() -> None:
    machine = reading(7)
    machine.failed(BROKEN, 1.0)
    machine.received(start(7), 1.2)
    with pytest.raises(StreamCorruptError, match="expected 7"):
        machine.received(events(6, LOG[6:9]), 1.3)


def test_an_end_without_a_stream_end_is_noticed() -> None:
    with pytest.raises(StreamCorruptError, match="without a StreamEnd"):
        reading(7).ended()


def test_a_lost_status_after_the_last_event_is_no_loss() -> None:
    machine = reading(len(LOG))
    assert machine.failed(BROKEN, 1.0) is None
    assert machine.state is FollowState.COMPLETE


def test_waits_double_up_to_a_bound_and_chance_takes_up_to_a_half() -> None:
    for chance, share in ((0.0, 0.5), (1.0, 1.0)):
        machine = follower(window_s=60.0, chance=lambda chance=chance: chance)  # type: ignore[misc]
        machine.begin()
        machine.received(start(window_s=60.0), 0.0)
        waits = [next_call(machine.failed(BROKEN, 1.0)).after_s for _ in range(8)]
        assert waits == pytest.approx([w * share for w in (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0)])


def test_the_window_bounds_the_time_without_progress_and_its_end_has_a_last_attempt() -> None:
    machine = reading(7)
    now_s, attempts = 100.0, 0
    step = machine.failed(BROKEN, now_s)
    while isinstance(step, NextCall):
        now_s += step.after_s
        attempts += 1
        step = machine.failed(BROKEN, now_s)
    assert now_s == pytest.approx(100.0 + WINDOW_S)
    assert attempts > 5
    error = given_up(step)
    assert isinstance(error, StreamIncompleteError)
    assert (error.code, error.position, error.stream_id) == ("UNAVAILABLE", 7, "s-1")
    assert error.token_ids == IDS[:7]
    assert error.text == "".join(f"word{i} " for i in range(7))
    assert "Socket closed" in str(error)


def test_progress_begins_the_window_anew_and_a_start_alone_does_not() -> None:
    machine = reading()
    now_s, position = 0.0, 0
    for _ in range(10):  # each connection brings one token, 9 s after the break
        machine.failed(BROKEN, now_s)
        now_s += 9.0
        machine.received(start(position), now_s)
        machine.received(events(position, LOG[position : position + 1]), now_s)
        position += 1
    for _ in range(100):  # each brings nothing and breaks
        step = machine.failed(BROKEN, now_s)
        if isinstance(step, GiveUp):
            break
        now_s += next_call(step).after_s
        machine.received(start(position), now_s)
    assert given_up(step).code == "UNAVAILABLE"
    assert now_s <= 90.0 + WINDOW_S


def test_a_connection_that_held_for_a_while_was_a_good_one_though_it_brought_nothing() -> None:
    machine = reading()
    now_s = 0.0
    for _ in range(100):  # a queue of minutes behind a router that drops idle connections
        step = next_call(machine.failed(BROKEN, now_s))
        assert step.after_s < 0.1
        machine.received(start(), now_s + step.after_s)
        now_s += 30.0


@pytest.mark.parametrize("code", ["UNAVAILABLE", "INTERNAL", "CANCELLED"])
def test_what_a_transport_says_is_a_broken_connection(code: str) -> None:
    next_call(reading(7).failed(CallFailedError(code, "RST_STREAM"), 1.0))


@pytest.mark.parametrize(
    "error",
    [
        WORKER_LOST,
        refused("UNAVAILABLE", "SERVER_STOPPED"),
        refused("DEADLINE_EXCEEDED", "DEADLINE_PASSED"),
        CallFailedError("DEADLINE_EXCEEDED", "Deadline Exceeded"),
        CallFailedError("UNKNOWN", "Unexpected <class 'KeyError'>"),
        refused("INTERNAL", "INTERNAL"),
        REPLACED,
    ],
)
def test_what_ends_a_stream_for_good_is_raised_with_what_was_received(error: CallFailedError) -> None:
    raised = given_up(reading(7).failed(error, 1.0))
    assert isinstance(raised, StreamIncompleteError)
    assert (raised.code, raised.server_reason) == (error.code, error.server_reason)
    assert (raised.position, raised.token_ids) == (7, IDS[:7])


@pytest.mark.parametrize(
    "error",
    [
        refused("NOT_FOUND", "STREAM_EXPIRED"),
        refused("NOT_FOUND", "STREAM_OF_ANOTHER_INSTANCE"),
        NOT_FOUND,
        refused("OUT_OF_RANGE", "POSITION_EVICTED"),
        refused("UNAUTHENTICATED", "UNAUTHENTICATED"),
    ],
)
def test_a_resume_that_is_refused_is_raised_with_what_was_received(error: CallFailedError) -> None:
    machine = reading(7)
    next_call(machine.failed(BROKEN, 1.0))
    raised = given_up(machine.failed(error, 1.1))
    assert isinstance(raised, StreamIncompleteError)
    assert raised.server_reason == error.server_reason
    assert raised.text == "".join(f"word{i} " for i in range(7))


def test_a_resume_that_is_told_to_come_later_waits_for_as_long() -> None:
    machine = reading(7)
    machine.failed(BROKEN, 1.0)
    assert next_call(machine.failed(refused("RESOURCE_EXHAUSTED", "BUSY", 3.0), 1.1)).after_s == 3.0


def test_a_reader_that_was_cut_off_for_taking_nothing_goes_on() -> None:
    step = next_call(reading(7).failed(STALLED, 1.0))
    assert isinstance(step.request, pb.ResumeRequest)
    assert isinstance(given_up(reading(7, window_s=0.0).failed(STALLED, 1.0)), StreamIncompleteError)


def test_a_reader_that_was_replaced_by_a_call_of_its_own_takes_the_stream_back_once() -> None:
    machine = reading(7)
    machine.failed(BROKEN, 1.0)
    machine.failed(BROKEN, 1.1)  # that Resume may arrive yet
    machine.received(start(7), 1.2)
    next_call(machine.failed(REPLACED, 1.3))
    machine.received(start(7), 1.4)
    assert given_up(machine.failed(REPLACED, 1.5)).server_reason == "READER_REPLACED"


def test_without_a_window_a_broken_call_is_raised_with_what_was_received() -> None:
    for asked_s, granted_s in ((0.0, 0.0), (WINDOW_S, 0.0)):
        machine = follower(window_s=asked_s)
        machine.begin()
        machine.received(start(window_s=granted_s), 0.0)
        machine.received(events(0, LOG[:7]), 0.0)
        assert isinstance(given_up(machine.failed(BROKEN, 1.0)), StreamIncompleteError)


def test_what_the_server_grants_is_the_window() -> None:
    machine = follower()
    machine.begin()
    machine.received(start(window_s=0.3), 0.0)
    machine.failed(BROKEN, 1.0)
    assert isinstance(machine.failed(BROKEN, 1.31), GiveUp)


def test_the_deadline_covers_the_waits() -> None:
    machine = reading(7, deadline_s=1.05)
    assert machine.remaining_s(1.0) == pytest.approx(0.05)
    assert given_up(machine.failed(BROKEN, 1.0)).code == "UNAVAILABLE"
    assert machine.remaining_s(2.0) == 0.0
    assert reading(7).remaining_s(2.0) is None


# ---------------------------------------------------------------------------------------------------------
# Before the first message


def test_a_request_is_sent_with_a_name_and_a_secret_of_its_own() -> None:
    requests = [follower().begin().request for _ in range(2)]
    for request in requests:
        assert isinstance(request, pb.GenerateRequest)
        assert len(request.request_id) == 22
        assert len(request.resume_token) == 16
        assert request.stream.resume_window_ms == WINDOW_S * 1000
    assert requests[0].request_id != requests[1].request_id
    request = follower(window_s=0.0).begin().request
    assert isinstance(request, pb.GenerateRequest)
    assert request.request_id
    assert not request.resume_token
    assert not request.stream.HasField("resume_window_ms")


def test_a_lost_request_is_looked_for_before_it_is_sent_again() -> None:
    machine = follower()
    sent = machine.begin().request
    find = next_call(machine.failed(BROKEN, 1.0)).request
    assert isinstance(find, pb.ResumeRequest)
    assert isinstance(sent, pb.GenerateRequest)
    assert (find.request_id, find.resume_token) == (sent.request_id, sent.resume_token)
    assert find.position == 0
    again = next_call(machine.failed(NOT_FOUND, 1.1))
    assert (again.request, again.after_s) == (sent, 0.0)
    assert (machine.num_resends, machine.num_resumes) == (1, 0)


def test_a_lost_request_that_is_found_is_not_sent_again() -> None:
    machine = follower()
    machine.begin()
    machine.failed(BROKEN, 1.0)
    machine.received(start(), 1.1)
    machine.received(events(0, LOG), 1.2)
    machine.ended()
    assert (machine.text, machine.num_resends, machine.num_resumes) == (TEXT, 0, 1)


def test_a_lost_request_that_arrives_late_is_found_after_all() -> None:
    machine = follower()
    machine.begin()
    machine.failed(BROKEN, 1.0)
    machine.failed(NOT_FOUND, 1.1)
    step = next_call(machine.failed(IN_USE, 1.2))
    assert isinstance(step.request, pb.ResumeRequest)
    assert step.after_s == 0.0


def test_a_request_id_that_is_another_streams_is_refused_and_that_stream_left_alone() -> None:
    machine = follower()
    machine.begin()
    assert given_up(machine.failed(IN_USE, 1.0)) is IN_USE
    machine = follower()
    machine.begin()
    machine.failed(BROKEN, 1.0)
    machine.failed(NOT_FOUND, 1.1)
    machine.failed(IN_USE, 1.2)
    assert given_up(machine.failed(NOT_FOUND, 1.3)) is IN_USE


@pytest.mark.parametrize("error", [BUSY, DRAINING])
def test_a_refused_request_is_sent_again_after_the_hint_and_so_often_at_most(error: CallFailedError) -> None:
    machine = follower(max_retries=3)
    sent = machine.begin().request
    for wait_s in (0.1, 0.2, 0.4):
        step = next_call(machine.failed(error, 1.0))
        assert step.request == sent
        assert step.after_s == pytest.approx(1.0 + 0.75 * wait_s)
    assert given_up(machine.failed(error, 1.0)) is error
    assert machine.num_resends == 0


def test_refusals_are_tried_again_without_a_window_too() -> None:
    machine = follower(window_s=0.0)
    machine.begin()
    next_call(machine.failed(BUSY, 1.0))
    machine = follower(window_s=0.0)
    machine.begin()
    pushed_back = CallFailedError("UNAVAILABLE", "a proxy's own word", retry_after_s=0.5)
    assert isinstance(next_call(machine.failed(pushed_back, 1.0)).request, pb.GenerateRequest)


def test_a_refusal_whose_hint_is_beyond_the_deadline_is_raised_at_once() -> None:
    machine = follower(deadline_s=1.5)
    machine.begin()
    assert given_up(machine.failed(BUSY, 1.0)) is BUSY


def test_a_server_that_cannot_be_reached_is_given_up_after_the_retries() -> None:
    machine = follower(max_retries=2)
    machine.begin()
    now_s = 0.0
    for _ in range(2):
        now_s += next_call(machine.failed(BROKEN, now_s)).after_s
    assert given_up(machine.failed(BROKEN, now_s)) is BROKEN
    assert now_s < 1.0
    machine = follower(window_s=0.0)
    machine.begin()
    assert given_up(machine.failed(BROKEN, 0.0)) is BROKEN


@pytest.mark.parametrize(
    "error",
    [
        refused("INVALID_ARGUMENT", "INVALID_REQUEST"),
        refused("UNAUTHENTICATED", "UNAUTHENTICATED"),
        refused("NOT_FOUND", "MODEL_NOT_FOUND"),
        refused("RESOURCE_EXHAUSTED", "TOO_MANY_WAITING"),
        CallFailedError("RESOURCE_EXHAUSTED", "Received message larger than max"),
        CallFailedError("UNKNOWN", "Unexpected <class 'KeyError'>"),
        CallFailedError("DEADLINE_EXCEEDED", "Deadline Exceeded"),
        WORKER_LOST,
    ],
)
def test_any_other_refusal_is_raised_at_once(error: CallFailedError) -> None:
    machine = follower()
    machine.begin()
    assert given_up(machine.failed(error, 1.0)) is error


def on_leaving(machine: Follower) -> pb.CancelRequest | None:
    return machine.cancel_request


def test_what_is_to_be_cancelled_on_leaving() -> None:
    machine = follower()
    machine.begin()
    assert on_leaving(machine) == pb.CancelRequest(request_id=machine.request_id)
    machine.received(start(), 1.0)
    assert on_leaving(machine) == pb.CancelRequest(stream_id="s-1")
    machine.failed(BROKEN, 1.0)
    assert on_leaving(machine) == pb.CancelRequest(stream_id="s-1")
    machine.failed(REPLACED, 1.0)  # whoever reads it now may go on
    assert on_leaving(machine) is None
    for error in (BROKEN, refused("OUT_OF_RANGE", "POSITION_EVICTED")):  # given up, and not ended
        machine = reading(7)
        machine.failed(BROKEN, 1.0)
        given_up(machine.failed(error, 1.0 + WINDOW_S))
        assert on_leaving(machine) == pb.CancelRequest(stream_id="s-1")
    machine = reading(7)
    machine.failed(WORKER_LOST, 1.0)
    assert on_leaving(machine) is None
    machine = reading(len(LOG))
    assert on_leaving(machine) is None
    machine.ended()
    assert on_leaving(machine) is None
    machine = follower(window_s=0.0)  # closing the call cancels
    machine.begin()
    assert on_leaving(machine) is None


# ---------------------------------------------------------------------------------------------------------
# Any order of faults


class Fault(Enum):
    """What becomes of one call."""

    NONE = "none"
    LOST_REQUEST = "lost request"
    """It breaks before the server hears of it."""
    CUT = "cut"
    """It breaks after some messages; perhaps before the first."""
    STALLED = "stalled"
    """The server ends it after some messages."""
    BUSY = "busy"
    """The server refuses it, if it is a Generate."""
    FORGOTTEN = "forgotten"
    """It goes to another server, which does not know the stream."""


@dataclass
class Network:
    """A server with faults before it; counts what it is made to run."""

    faults: Iterator[tuple[Fault, int, Codec, int]]
    streams: dict[str, str] = field(default_factory=dict)
    num_runs: int = 0

    def call(self, request: pb.GenerateRequest | pb.ResumeRequest) -> Iterator[pb.GenerateResponse]:
        fault, num_messages, codec, most = next(self.faults, (Fault.NONE, 0, Codec.PLAIN, 4))
        if fault is Fault.LOST_REQUEST:
            raise BROKEN
        if fault is Fault.FORGOTTEN:
            self.streams = {}
        if isinstance(request, pb.GenerateRequest):
            if fault is Fault.BUSY:
                raise BUSY
            if request.request_id in self.streams:
                raise IN_USE
            self.num_runs += 1
            stream_id, position = f"s-{self.num_runs}", 0
            self.streams[request.request_id] = stream_id
        elif request.request_id:
            if request.request_id not in self.streams:
                raise NOT_FOUND
            stream_id, position = self.streams[request.request_id], 0
        else:
            if request.stream_id not in self.streams.values():
                raise refused("NOT_FOUND", "STREAM_OF_ANOTHER_INSTANCE")
            stream_id, position = request.stream_id, request.position
        end = STALLED if fault is Fault.STALLED else BROKEN
        messages = self._messages(stream_id, position, codec, most)
        for number, message in enumerate(messages):
            if fault in (Fault.CUT, Fault.STALLED) and number == num_messages + (fault is Fault.STALLED):
                raise end
            yield message

    @staticmethod
    def _messages(stream_id: str, position: int, codec: Codec, most: int) -> Iterator[pb.GenerateResponse]:
        yield start(position, stream_id)
        encoder = ChunkEncoder(stream_id, codec, OutputOptions())
        for begin in range(position, len(LOG), most):
            yield pb.GenerateResponse.FromString(encoder.encode(begin, LOG[begin : begin + most]))


def follow(machine: Follower, network: Network) -> tuple[list[Chunk], CallFailedError | None, float]:
    """Do what the machine says, as the shells do; the chunks, how it failed, and how long it took."""
    chunks: list[Chunk] = []
    step: NextCall | GiveUp | None = machine.begin()
    now_s = 0.0
    while isinstance(step, NextCall):
        now_s += step.after_s
        try:
            for message in network.call(step.request):
                chunk = machine.received(message, now_s)
                chunks += [chunk] if chunk else []
            machine.ended()
            step = None
        except CallFailedError as error:
            step = machine.failed(error, now_s)
    return chunks, step.error if step else None, now_s


faults = st.tuples(
    st.sampled_from(Fault), st.integers(0, 12), st.sampled_from(Codec), st.sampled_from([1, 3, 8, 40])
)


@settings(max_examples=400, deadline=None)
@given(st.lists(faults, max_size=12), st.randoms(use_true_random=False))
def test_whatever_breaks_nothing_is_lost_or_repeated_and_nothing_runs_twice_unnoticed(
    plan: list[tuple[Fault, int, Codec, int]], chance: Random
) -> None:
    machine, network = follower(chance=chance.random), Network(iter(plan))
    chunks, error, took_s = follow(machine, network)
    text = "".join(chunk.text for chunk in chunks)
    ids = tuple(token_id for chunk in chunks for token_id in chunk.token_ids)
    assert (text, ids) == (machine.text, machine.token_ids)
    assert TEXT.startswith(text)
    assert IDS[: len(ids)] == ids
    positions = [chunk.position for chunk in chunks]
    assert positions == sorted(set(positions))
    if error is None:
        assert (text, ids, machine.state) == (TEXT, IDS, FollowState.COMPLETE)
    else:
        assert machine.state is FollowState.FAILED
        assert isinstance(error, StreamIncompleteError) or not chunks
        assert plan
    assert network.num_runs <= 1 + machine.num_resends
    if all(fault is not Fault.FORGOTTEN for fault, *_ in plan):
        assert network.num_runs <= 1
    assert took_s <= (len(plan) + 1) * (2.0 + 1.0)


def test_several_outputs_are_told_apart() -> None:
    elements: list[Element] = [
        PromptTokens((1, 2), "Say "),
        Token(1, 5, "b"),
        Token(0, 6, "a"),
        Token(1, 7, "c"),
        OutputEnd(1, Finish(FinishReason.LENGTH)),
        ToolCallMade(0, ToolCall("call-0", "add", "{}")),
        OutputEnd(0, Finish(FinishReason.STOP, matched="x")),
        StreamEnd(2, 3),
    ]
    machine = follower(num_outputs=2)
    machine.received(start(), 0.0)
    machine.received(events(0, elements), 0.0)
    machine.ended()
    first, second = machine.outputs
    assert (first.text, first.token_ids, first.finish_reason, first.matched) == ("a", [6], "STOP", "x")
    assert [(call.id, call.name) for call in first.tool_calls] == [("call-0", "add")]
    assert (second.text, second.token_ids, second.finish_reason) == ("bc", [5, 7], "LENGTH")
    assert [list(piece.token_ids) for piece in machine.prompt] == [[1, 2]]
    assert machine.num_tokens == 3


def test_an_output_that_was_not_asked_for_breaks_the_contract() -> None:
    with pytest.raises(StreamCorruptError, match="has an output 1, of 1 asked for"):
        reading().received(events(0, [Token(1, 5, "b")]), 0.0)
