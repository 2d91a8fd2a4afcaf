"""Messages → domain requests. A bad field is refused here, with its name, and nowhere later."""

import asyncio
import json
from collections.abc import Sequence as Seq

from google.protobuf.json_format import MessageToDict

from streamsrv.chat import ChatMessage, Tool, ToolCall
from streamsrv.chunks import CODEC_FROM_PB
from streamsrv.constraint.spec import ConstraintKind, ConstraintSpec
from streamsrv.errors import FieldViolation, InvalidRequestError
from streamsrv.request import (
    Codec,
    GenerateRequest,
    OutputOptions,
    RequestLimits,
    SamplingParams,
    SchedulingOptions,
    StopConditions,
    StreamOptions,
    ToolParsing,
)
from streamsrv.tokenizer import Tokenizer
from streamsrv.v1 import inference_pb2 as pb

_ROLES = {
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "assistant",
    pb.ROLE_TOOL: "tool",
}
# A prompt longer than this is encoded on another thread: 1,000 characters take about a millisecond, for
# which the loop can stand still, a megabyte takes a second.
_MAX_INLINE_CHARACTERS = 1000


_DEFAULT_SAMPLING = SamplingParams()


def _bad(field: str, description: str) -> InvalidRequestError:
    return InvalidRequestError(FieldViolation(field, description))


async def parse_generate(
    message: pb.GenerateRequest,
    tokenizer: Tokenizer,
    vocab_size: int,
    deadline_s: float | None,
    limits: RequestLimits,
) -> GenerateRequest:
    """Read a GenerateRequest; `deadline_s` is that of the call, on the server's clock.

    `vocab_size` is the model's: tables are often larger than what the tokenizer uses of them.

    Raises:
        InvalidRequestError: a field is wrong.
        ChatTemplateError: the model's template refuses the messages, or there is none.
    """
    sampling = parse_sampling(message.sampling, vocab_size, limits)
    stop = parse_stop(message.stop, vocab_size, limits)
    stream = parse_stream(message.stream)
    constraint = parse_constraint(message.constraint, limits) if message.HasField("constraint") else None
    ids = await encode_prompt(message.prompt, tokenizer, vocab_size)
    return GenerateRequest(
        request_id=message.request_id,
        prompt_token_ids=tuple(ids),
        continues_text=message.prompt.WhichOneof("kind") != "chat",
        sampling=sampling,
        stop=stop,
        output=parse_output(message.output, limits),
        stream=stream,
        scheduling=parse_scheduling(message.scheduling),
        num_outputs=message.num_outputs if message.HasField("num_outputs") else 1,
        limits=limits,
        constraint=constraint,
        tool_parsing=parse_tool_parsing(message.prompt, tokenizer, ids),
        resume_token=message.resume_token,
        deadline_s=deadline_s,
    )


async def encode_prompt(prompt: pb.Prompt, tokenizer: Tokenizer, vocab_size: int) -> Seq[int]:
    """Turn a prompt in any of its forms into token ids.

    Raises:
        InvalidRequestError: no form is given, it is empty, or an id or a role is not known.
        ChatTemplateError: the model's template refuses the messages, or there is none.
    """
    kind = prompt.WhichOneof("kind")
    if kind == "text":
        return await _encode_text(prompt, tokenizer)
    if kind == "token_ids":
        ids = list(prompt.token_ids.ids)
        if not ids:
            raise _bad("prompt.token_ids.ids", "must have at least one id")
        check_token_ids(ids, vocab_size, "prompt.token_ids.ids")
        return ids
    if kind == "chat":
        return await _encode_chat(prompt, tokenizer)
    raise _bad("prompt", "is missing; give text, token_ids or chat")


def shown_prompt(prompt: pb.Prompt) -> str:
    """Give a prompt as text, for a log: the text itself, or the ids or the messages as JSON."""
    kind = prompt.WhichOneof("kind")
    if kind == "token_ids":
        return json.dumps(list(prompt.token_ids.ids))
    if kind == "chat":
        return json.dumps([[_ROLES.get(m.role, ""), m.content] for m in prompt.chat.messages])
    return prompt.text


def check_token_ids(ids: Seq[int], vocab_size: int, field: str) -> None:
    """Refuse ids that the model does not have.

    Raises:
        InvalidRequestError: an id is `vocab_size` or more; the first of them is named.
    """
    for i, token_id in enumerate(ids):
        if token_id >= vocab_size:
            raise _bad(f"{field}[{i}]", f"must be below the vocabulary's size, {vocab_size}, got {token_id}")


async def _encode_text(prompt: pb.Prompt, tokenizer: Tokenizer) -> list[int]:
    if not prompt.text:
        raise _bad("prompt.text", "must not be empty")
    add_special = prompt.add_special_tokens if prompt.HasField("add_special_tokens") else True

    def encode() -> list[int]:
        return tokenizer.encode(
            prompt.text, add_special=add_special, parse_special=prompt.parse_special_tokens
        )

    return encode() if len(prompt.text) <= _MAX_INLINE_CHARACTERS else await asyncio.to_thread(encode)


async def _encode_chat(prompt: pb.Prompt, tokenizer: Tokenizer) -> list[int]:
    messages, tools = parse_messages(prompt.chat), parse_tools(prompt.chat)
    try:
        variables = MessageToDict(prompt.chat.template_variables) or None
    except ValueError as error:  # a number that JSON does not have
        raise _bad("prompt.chat.template_variables", str(error)) from error

    def encode() -> list[int]:
        return tokenizer.encode_chat(
            messages, tools=tools, variables=variables, parse_special=prompt.parse_special_tokens
        )

    return encode() if prompt.ByteSize() <= _MAX_INLINE_CHARACTERS else await asyncio.to_thread(encode)


def parse_messages(chat: pb.Chat) -> list[ChatMessage]:
    """Read the turns of a chat.

    Raises:
        InvalidRequestError: there are none, or a role is not known.
        ChatTemplateError: a turn has what its role cannot have.
    """
    messages = []
    for i, message in enumerate(chat.messages):
        if message.role not in _ROLES:
            allowed = ", ".join(pb.Role.Name(role) for role in _ROLES)
            raise _bad(f"prompt.chat.messages[{i}].role", f"must be one of {allowed}, got {message.role}")
        calls = tuple(ToolCall(call.id, call.name, call.arguments_json) for call in message.tool_calls)
        messages.append(ChatMessage(_ROLES[message.role], message.content, calls, message.tool_call_id))
    if not messages:
        raise _bad("prompt.chat.messages", "must have at least one message")
    return messages


def parse_tools(chat: pb.Chat) -> tuple[Tool, ...]:
    """Read the tools of a chat.

    Raises:
        InvalidRequestError: one has no name.
    """
    for i, tool in enumerate(chat.tools):
        if not tool.name:
            raise _bad(f"prompt.chat.tools[{i}].name", "must not be empty")
    return tuple(Tool(tool.name, tool.description, tool.parameters_json_schema) for tool in chat.tools)


def parse_tool_parsing(prompt: pb.Prompt, tokenizer: Tokenizer, ids: Seq[int]) -> ToolParsing | None:
    """Say how calls are found in the outputs; None if no tools are offered, or the model has no way to call.

    `ids` are the prompt's.
    """
    if not prompt.chat.tools or (form := tokenizer.tool_call_format) is None:
        return None
    num_earlier = sum(len(message.tool_calls) for message in prompt.chat.messages)
    return ToolParsing(form, parse_tools(prompt.chat), num_earlier, tokenizer.opens_thought(ids))


def parse_constraint(message: pb.Constraint, limits: RequestLimits) -> ConstraintSpec:
    """Read a Constraint.

    Raises:
        InvalidRequestError: it says nothing, or cannot be followed.
    """
    kind = message.WhichOneof("kind")
    if kind is None:
        raise _bad("constraint", "is empty; give json_schema, regex, lark or choices, or leave it out")
    texts = tuple(message.choices.texts) if kind == "choices" else (getattr(message, kind),)
    return ConstraintSpec(ConstraintKind(kind), texts, limits.max_constraint_bytes)


def parse_sampling(message: pb.SamplingParams, vocab_size: int, limits: RequestLimits) -> SamplingParams:
    """Read SamplingParams; what is absent takes its default.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    default = _DEFAULT_SAMPLING
    for name in ("banned_token_ids", "allowed_token_ids"):
        check_token_ids(getattr(message, name), vocab_size, f"sampling.{name}")
    check_token_ids([bias.token_id for bias in message.logit_bias], vocab_size, "sampling.logit_bias")
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else default.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else default.top_p,
        min_p=message.min_p,
        seed=message.seed if message.HasField("seed") else None,
        typical_p=message.typical_p if message.HasField("typical_p") else default.typical_p,
        repetition_penalty=message.repetition_penalty
        if message.HasField("repetition_penalty")
        else default.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple((bias.token_id, bias.bias) for bias in message.logit_bias),
        banned_token_ids=frozenset(message.banned_token_ids),
        allowed_token_ids=frozenset(message.allowed_token_ids),
        limits=limits,
    )


def parse_stop(message: pb.StopConditions, vocab_size: int, limits: RequestLimits) -> StopConditions:
    """Read StopConditions; what is absent takes its default.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    check_token_ids(message.stop_token_ids, vocab_size, "stop.stop_token_ids")
    return StopConditions(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop=message.include_stop,
        limits=limits,
    )


def parse_output(message: pb.OutputOptions, limits: RequestLimits) -> OutputOptions:
    """Read OutputOptions; what is absent takes its default.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    return OutputOptions(
        text=message.text if message.HasField("text") else True,
        token_ids=message.token_ids if message.HasField("token_ids") else True,
        text_lengths=message.text_lengths,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        logprobs=message.logprobs,
        num_top_logprobs=message.num_top_logprobs,
        prompt_logprobs=message.prompt_logprobs,
        echo=message.echo,
        limits=limits,
    )


def parse_scheduling(message: pb.SchedulingOptions) -> SchedulingOptions:
    """Read SchedulingOptions; what is absent takes its default.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    return SchedulingOptions(
        priority=message.priority,
        use_prefix_cache=message.use_prefix_cache if message.HasField("use_prefix_cache") else True,
        cache_salt=message.cache_salt,
        prompt_lookup=message.prompt_lookup if message.HasField("prompt_lookup") else True,
    )


def parse_stream(message: pb.StreamOptions) -> StreamOptions:
    """Read StreamOptions; what is absent takes its default.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    known = [CODEC_FROM_PB[number] for number in message.accepted_codecs if number in CODEC_FROM_PB]
    most = message.max_tokens_per_chunk if message.HasField("max_tokens_per_chunk") else None
    has_interval = message.HasField("min_chunk_interval_ms")
    return StreamOptions(
        codec=known[0] if known else Codec.PLAIN,
        max_tokens_per_chunk=most,
        min_chunk_interval_s=message.min_chunk_interval_ms / 1000 if has_interval else None,
        resume_window_s=message.resume_window_ms / 1000,
    )
