"""Requests from Python values."""

import json
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, TypeAlias

from streamsrv.request import RESUME_TOKEN_BYTES
from streamsrv.v1 import inference_pb2 as pb

ChatMessages: TypeAlias = Seq[tuple[str, str]]
"""(role, content) pairs; roles are system, user, assistant and tool."""
PromptLike: TypeAlias = str | Seq[int] | ChatMessages | pb.Prompt


def make_prompt(prompt: PromptLike) -> pb.Prompt:
    """Make a Prompt from a text, token ids, or (role, content) pairs."""
    if isinstance(prompt, pb.Prompt):
        return prompt
    if isinstance(prompt, str):
        return pb.Prompt(text=prompt)
    messages, ids = [], []
    for part in prompt:
        if isinstance(part, tuple):
            role, content = part
            messages.append(pb.ChatMessage(role=pb.Role.Value(f"ROLE_{role.upper()}"), content=content))
        else:
            ids.append(part)
    if messages:
        return pb.Prompt(chat=pb.Chat(messages=messages))
    return pb.Prompt(token_ids=pb.TokenIds(ids=ids))


def make_request(
    prompt: PromptLike,
    *,
    model: str = "",
    request_id: str = "",
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    typical_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    banned_token_ids: Seq[int] = (),
    allowed_token_ids: Seq[int] = (),
    seed: int | None = None,
    num_outputs: int | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    stop: Seq[str] = (),
    stop_token_ids: Seq[int] = (),
    ignore_eos: bool | None = None,
    include_stop: bool | None = None,
    logprobs: bool | None = None,
    num_top_logprobs: int | None = None,
    prompt_logprobs: bool | None = None,
    echo: bool | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    regex: str | None = None,
    lark: str | None = None,
    choices: Seq[str] = (),
    priority: int | None = None,
    use_prefix_cache: bool | None = None,
    cache_salt: str = "",
    prompt_lookup: bool | None = None,
    zstd: bool = True,
    max_tokens_per_chunk: int | None = None,
    min_chunk_interval_ms: int | None = None,
    resume_window_s: float | None = None,
) -> pb.GenerateRequest:
    """Make a GenerateRequest; what is left out takes the contract's default, but that zstd is accepted.

    Raises:
        ValueError: a role is unknown, a number does not fit in its field, or the output is constrained in two
            ways.
    """
    return pb.GenerateRequest(
        request_id=request_id,
        model=model,
        prompt=make_prompt(prompt),
        sampling=pb.SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=[pb.LogitBias(token_id=i, bias=bias) for i, bias in (logit_bias or {}).items()],
            banned_token_ids=banned_token_ids,
            allowed_token_ids=allowed_token_ids,
            seed=seed,
        ),
        stop=pb.StopConditions(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            include_stop=include_stop,
        ),
        output=pb.OutputOptions(
            logprobs=logprobs, num_top_logprobs=num_top_logprobs, prompt_logprobs=prompt_logprobs, echo=echo
        ),
        stream=pb.StreamOptions(
            accepted_codecs=[pb.CODEC_ZSTD] if zstd else [],
            max_tokens_per_chunk=max_tokens_per_chunk,
            min_chunk_interval_ms=min_chunk_interval_ms,
            resume_window_ms=None if resume_window_s is None else round(resume_window_s * 1000),
        ),
        num_outputs=num_outputs,
        constraint=_make_constraint(json_schema, regex, lark, choices),
        scheduling=pb.SchedulingOptions(
            priority=priority,
            use_prefix_cache=use_prefix_cache,
            cache_salt=cache_salt,
            prompt_lookup=prompt_lookup,
        ),
    )


def _make_constraint(
    json_schema: str | Mapping[str, Any] | None, regex: str | None, lark: str | None, choices: Seq[str]
) -> pb.Constraint | None:
    given: dict[str, Any] = {"regex": regex, "lark": lark}
    if json_schema is not None:
        is_text = isinstance(json_schema, str)
        given["json_schema"] = json_schema if is_text else json.dumps(json_schema, ensure_ascii=False)
    if choices:
        given["choices"] = pb.Choices(texts=choices)
    given = {kind: value for kind, value in given.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"an output takes one constraint, not {' and '.join(sorted(given))}")
    return pb.Constraint(**given) if given else None


def make_resumable(request: pb.GenerateRequest, resume_window_s: float) -> pb.GenerateRequest:
    """Copy a request, and add what its stream can be found again by.

    That is a request id, a resume window and, where the window is not 0, a secret of the client's own. What
    the request says of these itself stays.
    """
    result = pb.GenerateRequest()
    result.CopyFrom(request)
    result.request_id = request.request_id or secrets.token_urlsafe(16)
    if not request.stream.HasField("resume_window_ms") and resume_window_s > 0:
        result.stream.resume_window_ms = round(resume_window_s * 1000)
    if result.stream.resume_window_ms and not request.resume_token:
        result.resume_token = secrets.token_bytes(RESUME_TOKEN_BYTES)
    return result


def make_cancel(stream_id: str | None, request_id: str | None) -> pb.CancelRequest:
    """Make a CancelRequest that names a stream by either of its names."""
    if stream_id is not None:
        return pb.CancelRequest(stream_id=stream_id)
    return pb.CancelRequest(request_id=request_id or "")
