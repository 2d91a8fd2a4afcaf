"""Bytes on the wire per token, on a model's real output."""

import asyncio
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engines.api import Engine
from engines.demo_model import model_path
from engines.registry import inspect_model
from engines.spec import ModelInfo
from streamsrv.bench.load import load_client
from streamsrv.bench.relay import ByteRelay
from streamsrv.bench.suite.markdown import section
from streamsrv.bench.suite.replay import ReplayEngine
from streamsrv.bench.suite.server_process import server_process
from streamsrv.bench.suite.sse import sse_response
from streamsrv.client import Client
from streamsrv.config import Settings
from streamsrv.request import MAX_CHUNK_INTERVAL_S
from streamsrv.server import serving

TOKENS_PER_CHUNK = (1, 4, 8)
MAX_TOKENS = 512
QUESTIONS = (
    "Explain how a rainbow forms, step by step.",
    "Write a Python function that merges two sorted lists, and explain it.",
    "Tell me a short story about a lighthouse keeper.",
    "What should I pack for a week of hiking in the Alps?",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model once said."""

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    """The text that each token brought."""
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class WireRow:
    """What answers cost, sent one way."""

    tokens_per_message: float
    message_bytes: float
    """A token, of gRPC messages with their prefixes."""
    wire_bytes: float
    """A token, of all that the server put on the connection."""


async def record_answers(client: Client, questions: Seq[str] = QUESTIONS) -> list[Answer]:
    """Ask a server, all questions at the same time.

    Not greedily: a small model then repeats itself without end, and a text of repetitions compresses better
    than any that is worth reading.
    """

    async def ask(question: str) -> Answer:
        ids: list[int] = []
        pieces: list[str] = []
        stream = client.generate(
            [("user", question)],
            max_tokens=MAX_TOKENS,
            temperature=0.7,
            top_p=0.95,
            seed=1,
            max_tokens_per_chunk=1,
        )
        async with stream:
            num_prompt_tokens = (await stream.start()).num_prompt_tokens
            async for chunk in stream:
                if chunk.num_tokens:
                    ids += chunk.token_ids
                    pieces.append(chunk.text)
        return Answer(tuple(ids), tuple(pieces), num_prompt_tokens)

    return list(await asyncio.gather(*(ask(question) for question in questions)))


async def measure_wire(
    model: ModelInfo, answers: Seq[Answer], *, tokens_per_chunk: int, zstd: bool
) -> WireRow:
    """Replay answers, one after the other on one connection, through the real server and a relay."""
    engine: Engine = ReplayEngine(model, [answer.token_ids for answer in answers])
    num_tokens = num_messages = message_bytes = 0
    settings = Settings(listen="127.0.0.1:0", log_level="warning")
    async with (
        serving(settings, engine) as server,
        ByteRelay("127.0.0.1", server.port) as relay,
        load_client(relay.target) as client,
    ):
        await client.server_info()  # connecting is done once, and not counted
        before = relay.count
        for number, answer in enumerate(answers):
            stream = client.generate(
                [number],
                temperature=0.0,
                max_tokens=len(answer.token_ids),
                ignore_eos=True,
                zstd=zstd,
                max_tokens_per_chunk=tokens_per_chunk,
                # The first message has one token and goes at once; the others are cut when all is there.
                min_chunk_interval_ms=int(MAX_CHUNK_INTERVAL_S * 1000) if tokens_per_chunk > 1 else None,
            )
            async with stream:
                async for chunk in stream:
                    num_messages += chunk.num_tokens > 0
            num_tokens += stream.num_tokens
            message_bytes += stream.num_bytes
        wire_bytes = (relay.count - before).down
    return WireRow(num_tokens / num_messages, message_bytes / num_tokens, wire_bytes / num_tokens)


async def wire_section(model: str, say: Callable[[str], None]) -> str:
    """Count what the demo model's own answers take, sent in every way."""
    say(f"recording {len(QUESTIONS)} answers")
    async with server_process("--model", model) as server, Client(str(server.address)) as client:
        answers = await record_answers(client)
    info = inspect_model(model_path(model))
    rows = []
    for tokens_per_chunk in TOKENS_PER_CHUNK:
        say(f"sending them at {tokens_per_chunk} tokens a chunk")
        plain = await measure_wire(info, answers, tokens_per_chunk=tokens_per_chunk, zstd=False)
        zstd = await measure_wire(info, answers, tokens_per_chunk=tokens_per_chunk, zstd=True)
        sse, sse_gzip = (
            _sse_bytes_per_token(info.name, answers, tokens_per_chunk, gzip=gzip) for gzip in (False, True)
        )
        rows.append(
            [
                str(tokens_per_chunk),
                f"{plain.tokens_per_message:.2f}",
                f"{plain.message_bytes:.1f}",
                f"{zstd.message_bytes:.1f}",
                f"{plain.wire_bytes:.1f}",
                f"{zstd.wire_bytes:.1f}",
                f"{sse:.1f}",
                f"{sse_gzip:.1f}",
                f"{sse / zstd.wire_bytes:.1f}",
            ]
        )
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    return section(
        "Bytes per token",
        f"{len(answers)} answers of {info.name} to chat questions ({num_tokens:,} tokens, temperature 0.7, "
        f"ended by the model or at {MAX_TOKENS}), recorded once and replayed through the real server. Ours "
        "carries ids and text. gRPC: messages with their 5-byte prefixes; wire: everything from the "
        "server on the TCP connection, counted by a relay (HTTP/2 frames, headers, StreamStart and "
        "trailers included, connecting excluded). SSE: the same text, without ids, in as many events, as "
        "`chat.completion.chunk` lines with usage over HTTP/1.1 with chunked framing, headers included; "
        "its bytes are formed and counted, not sent. SSE gzip: the same through one gzip stream, flushed "
        "after each event.",
        (
            *("tokens a chunk", "mean a message", "gRPC plain", "gRPC zstd", "wire plain", "wire zstd"),
            *("SSE", "SSE gzip", "SSE / wire zstd"),
        ),
        rows,
    )


def _sse_bytes_per_token(model: str, answers: Seq[Answer], tokens_per_chunk: int, *, gzip: bool) -> float:
    size = 0
    for answer in answers:
        # Cut as ours is: one token first, then full chunks.
        cuts = [0, *range(1, len(answer.pieces), tokens_per_chunk), len(answer.pieces)]
        groups = [answer.pieces[begin:end] for begin, end in itertools.pairwise(cuts)]
        response = sse_response(
            ["".join(group) for group in groups],
            model=model,
            finish_reason="stop",
            num_prompt_tokens=answer.num_prompt_tokens,
            gzip=gzip,
        )
        size += len(response)
    return size / sum(len(answer.token_ids) for answer in answers)
