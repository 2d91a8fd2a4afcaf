"""`streamsrv generate`."""

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import uvloop

from streamsrv.cli.flag_values import check_seconds, check_text, check_whole
from streamsrv.cli.server_flags import ServerChoice, add_server_flags, server_of
from streamsrv.errors import CallFailedError, SettingsError

# The least that each may be.
_WHOLE_NUMBERS = dict.fromkeys(("max_tokens", "outputs", "max_tokens_per_chunk"), 1)
_WHOLE_NUMBERS |= dict.fromkeys(("min_tokens", "top_k", "logprobs", "min_chunk_interval_ms"), 0)
_MAX_SEED = 2**64 - 1
_MAX_RESUME_WINDOW_S = 1e6


def add_command(commands: Any) -> None:  # argparse's own type for it is private
    """Add the command to the program's."""
    generate = commands.add_parser(
        "generate",
        help="stream an answer from a running server",
        description="Send a prompt to a running server and print the answer as it comes. The last line, on "
        "standard error, tells what was received.",
    )
    generate.add_argument("prompt", metavar="PROMPT", help="the text to continue; '-' reads standard input")
    add = generate.add_argument
    add("--model", default="", metavar="NAME", help="a name from the server's list; default: its first")
    add("--chat", action="store_true", help="send the prompt as a user's turn of a chat")
    add("--system", metavar="TEXT", help="with --chat: the system's turn before it")
    add("--max-tokens", type=int, metavar="N", help="most tokens to generate; default: as many as fit")
    add("--min-tokens", type=int, metavar="N", help="tokens before it may stop")
    add("--temperature", type=float, metavar="X", help="0 takes the best token always; default: 1")
    add("--top-k", type=int, metavar="N", help="keep the N best tokens")
    add("--top-p", type=float, metavar="X", help="keep the best tokens that have probability X together")
    add("--min-p", type=float, metavar="X", help="keep tokens at least X times as probable as the best")
    add("--typical-p", type=float, metavar="X", help="keep the least surprising tokens of probability X")
    add("--repetition-penalty", type=float, metavar="X", help="above 1: avoid tokens of prompt and output")
    add("--presence-penalty", type=float, metavar="X", help="above 0: avoid tokens of the output")
    add("--frequency-penalty", type=float, metavar="X", help="the same, for each time that they were said")
    add("--seed", type=int, metavar="N", help="makes sampling repeatable")
    add("--outputs", type=int, metavar="N", help="make N outputs; each is printed when it is complete")
    add("--logprobs", type=int, metavar="N", help="with --json: log probabilities, of the N best tokens, too")
    constraint = generate.add_mutually_exclusive_group()
    constraint.add_argument("--json-schema", metavar="SCHEMA", help="output JSON that this schema allows")
    constraint.add_argument("--regex", metavar="REGEX", help="output what matches this regular expression")
    constraint.add_argument("--lark", metavar="GRAMMAR", help="output what this Lark grammar allows")
    constraint.add_argument(
        "--choice", action="append", default=[], metavar="TEXT", help="output one of these; repeat for each"
    )
    add("--priority", type=int, metavar="N", help="from -100 to 100; the higher is computed first")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this; may be repeated")
    add("--ignore-eos", action="store_true", default=None, help="go on after end of text")
    add("--request-id", default="", metavar="ID", help="your own name for the request")
    add("--plain", action="store_true", help="do not accept zstd")
    add("--max-tokens-per-chunk", type=int, metavar="N", help="most tokens in a message")
    add("--min-chunk-interval-ms", type=int, metavar="N", help="least time between messages")
    add(
        "--resume-window",
        type=float,
        metavar="S",
        help="pick a broken stream up again for so long, 0 for not at all (default: 30)",
    )
    add("--json", action="store_true", help="print one JSON object per chunk")
    add_server_flags(generate)
    generate.set_defaults(command=_generate)


def _generate(arguments: argparse.Namespace) -> None:
    _check(arguments)
    uvloop.run(_stream(arguments, server_of(arguments), _text(arguments.prompt)))


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what the message has no place for; what else is wrong, the server says.

    Raises:
        SettingsError: a flag is out of its range, or without the other that it needs.
    """
    for name, least in _WHOLE_NUMBERS.items():
        check_whole("--" + name.replace("_", "-"), getattr(arguments, name), least)
    check_whole("--seed", arguments.seed, 0, _MAX_SEED)
    check_whole("--priority", arguments.priority, -100, 100)
    check_seconds("--resume-window", arguments.resume_window, _MAX_RESUME_WINDOW_S, may_be_0=True)
    for name in ("model", "system", "json_schema", "regex", "lark", "request_id"):
        check_text("--" + name.replace("_", "-"), getattr(arguments, name))
    for flag, texts in (("--choice", arguments.choice), ("--stop", arguments.stop)):
        for text in texts:
            check_text(flag, text)
    if arguments.system is not None and not arguments.chat:
        raise SettingsError("--system is given without --chat; only a chat has a system's turn")
    if arguments.logprobs is not None and not arguments.json:
        raise SettingsError("--logprobs is given without --json; only JSON shows them")


def _text(prompt: str) -> str:
    """Give the prompt, from standard input if it says so.

    Raises:
        SettingsError: it is not UTF-8.
    """
    if prompt != "-":
        check_text("PROMPT", prompt)
        return prompt
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise SettingsError(f"standard input is not UTF-8 text (at byte {error.start})") from None
    check_text("standard input", text)  # in some locales Python reads any bytes
    return text


async def _stream(arguments: argparse.Namespace, server: ServerChoice, text: str) -> None:
    from streamsrv.client import ChatMessages, Client, make_request

    prompt: str | ChatMessages = text
    if arguments.chat:
        prompt = [("user", text)]
        if arguments.system is not None:
            prompt = [("system", arguments.system), *prompt]
    request = make_request(
        prompt,
        model=arguments.model,
        request_id=arguments.request_id,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        typical_p=arguments.typical_p,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        seed=arguments.seed,
        num_outputs=arguments.outputs,
        logprobs=None if arguments.logprobs is None else True,
        num_top_logprobs=arguments.logprobs,
        json_schema=arguments.json_schema,
        regex=arguments.regex,
        lark=arguments.lark,
        choices=arguments.choice,
        priority=arguments.priority,
        max_tokens=arguments.max_tokens,
        min_tokens=arguments.min_tokens,
        stop=arguments.stop,
        ignore_eos=arguments.ignore_eos,
        zstd=not arguments.plain,
        max_tokens_per_chunk=arguments.max_tokens_per_chunk,
        min_chunk_interval_ms=arguments.min_chunk_interval_ms,
        resume_window_s=arguments.resume_window,
    )
    began_s = time.monotonic()
    async with Client(server.target, credentials=server.credentials, api_key=server.api_key) as client:
        async with client.send(request, timeout_s=server.timeout_s) as stream:
            try:
                async for chunk in stream:
                    if arguments.json:
                        print(json.dumps(_chunk_object(stream.stream_id, chunk)), flush=True)
                    elif len(stream.outputs) == 1:
                        print(chunk.text, end="", flush=True)
            except (CallFailedError, asyncio.CancelledError):
                if stream.received_text and not arguments.json:
                    print(flush=True)  # what is said next begins a line
                raise
        if not arguments.json:
            several = [f"[{o.index}: {o.finish_reason}] {o.text}" for o in stream.outputs]
            print("\n".join(several) if len(several) > 1 else "", flush=True)
    seconds = time.monotonic() - began_s
    first_s = stream.first_token_s or 0.0
    after_first_s = seconds - first_s
    if stream.num_resumes:
        times = "once" if stream.num_resumes == 1 else f"{stream.num_resumes} times"
        print(f"[the connection broke; the stream was resumed {times}]", file=sys.stderr)
    rate = (stream.num_tokens - 1) / after_first_s if stream.num_tokens > 1 else 0.0
    print(
        f"[stream {stream.stream_id}: {stream.num_tokens} tokens, {stream.finish_reason}, "
        f"first after {first_s * 1000:.0f} ms, {rate:.1f} tokens/s, "
        f"{stream.num_bytes / max(stream.num_tokens, 1):.1f} bytes/token]",
        file=sys.stderr,
    )


def _chunk_object(stream_id: str, chunk: Any) -> dict[str, Any]:
    """Lay a chunk out for `--json`: the first output's text and ids, and each event as protobuf has it."""
    from google.protobuf.json_format import MessageToDict

    return {
        "stream_id": stream_id,
        "position": chunk.position,
        "text": chunk.text,
        "token_ids": chunk.token_ids,
        "num_bytes": chunk.num_bytes,
        "events": [MessageToDict(event, preserving_proto_field_name=True) for event in chunk.events],
    }
