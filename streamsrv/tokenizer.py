"""Text to token ids and back, as the model's vocabulary has it."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import tokenizers

from engines.api import CheckpointError
from engines.spec import Vocabulary
from streamsrv.chat import ChatMessage, ChatTemplateError, Tool, chat_values
from streamsrv.chat_template import ChatTemplate
from streamsrv.content_mask import ContentMask, Placeholders
from streamsrv.tool_call_format import tool_call_format

_MAX_THINK_TOKENS = 16
"""More than `<think>` and the white space after it are in any vocabulary."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A vocabulary at work. Nothing in it changes after it is made: any number of threads may use it.

    Raises:
        CheckpointError: the vocabulary is faulty or decodes in a way that is not supported.

    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        # Whether control tokens are parsed is a property of the library's object: one object for each answer.
        self._parsing = _load(vocabulary.tokenizer_json)
        self._plain = _without_parsing(self._parsing)
        document = json.loads(vocabulary.tokenizer_json)
        self._inner = _without_first_space(document) or self._plain
        added = self._plain.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._decoding = _Decoding(document.get("decoder"))
        self.vocab_size = 1 + max((*self._plain.get_vocab(with_added_tokens=True).values(),), default=-1)
        """One more than the highest id that has a text."""
        self.eos_token_ids = vocabulary.eos_token_ids
        # A token's bytes are worked out when it is first met; threads may do the same work twice.
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self._mask = ContentMask(text for i, text in self._added.items() if i in self.special_ids)
        self.tool_call_format = tool_call_format(vocabulary)
        """How the model writes calls of tools; None if it does not."""
        self._template: ChatTemplate | ChatTemplateError
        try:
            self._template = _template(vocabulary)
        except ChatTemplateError as error:
            # The model still serves plain prompts.
            self._template = error

    @property
    def strips_first_space(self) -> bool:
        """Whether a text's first word is encoded with a space before it, which decoding takes away."""
        return self._decoding.strips_first_space

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a control token, which has no part in the text."""
        return token_id in self.special_ids

    def opens_thought(self, ids: Sequence[int]) -> bool:
        """Whether a prompt's end opens a thought, `<think>`, that the model goes on with."""
        return self.decode(ids[-_MAX_THINK_TOKENS:], skip_special=False).rstrip().endswith("<think>")

    def control_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Give the ids of those texts that are control tokens."""
        wanted = set(texts)
        return frozenset(i for i in self.special_ids if self._added[i] in wanted) if wanted else frozenset()

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Turn a text into ids.

        `add_special` adds what the model wants around a prompt, such as a beginning-of-sequence token.
        `parse_special` reads a control token's text as that token; without it, it is text like any other.
        """
        tokenizer = self._parsing if parse_special else self._plain
        return tokenizer.encode(text, add_special_tokens=add_special).ids

    def token_bytes(self, token_id: int) -> bytes:
        """What one token contributes to a text: part of a character perhaps; a control token's own text.

        An id that has no token, as in tables padded to a round size, contributes nothing.
        """
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            text = self._plain.id_to_token(token_id)
            if text is None:
                known = b""
            elif token_id in self._added:
                known = text.encode()
            else:
                known = self._decoding.token_bytes(text)
            self._bytes[token_id] = known
        return known

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> str:
        """Turn ids into the whole text; bytes that are no UTF-8 become U+FFFD.

        That is llama.cpp's bytes, decoded. It is Hugging Face's text too, except that one invalid byte makes
        its SentencePiece decoder replace each byte token of the run, the valid ones with it.

        `continues` says that the ids go on from a text, so that a space before the first word stays.
        """
        special = self.special_ids if skip_special else ()
        data = b"".join(self.token_bytes(i) for i in ids if i not in special)
        if self.strips_first_space and not continues and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Write messages and tools as the prompt that the model's template makes of them.

        `variables` are as in `ChatTemplate.render`.

        Raises:
            ChatTemplateError: there is no template, it is faulty, or it refuses what it is given.

        """
        return self._usable_template().render(
            messages, tools=tools, variables=variables, add_generation_prompt=add_generation_prompt
        )

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        parse_special: bool = False,
    ) -> list[int]:
        """Encode messages and tools through the template, whose control tokens are parsed.

        What looks like a control token inside a message, a tool, a call or a variable is text, unless
        `parse_special`. Otherwise the ids are those of the rendered prompt; nothing is added around it, since
        templates write such tokens.

        Raises:
            ChatTemplateError: as `render_chat`; or the template would build a control token out of one of
                these texts in a way that cannot be kept apart.

        """
        template = self._usable_template()
        render = partial(
            template.render,
            messages,
            tools=tools,
            variables=variables,
            add_generation_prompt=add_generation_prompt,
        )
        text = render()
        given: dict[str, None] = {}

        def seen(content: str) -> str:
            given[content] = None
            return content

        chat_values(messages, tools, variables or {}, seen)
        if parse_special or not any(map(self._mask.touches, given)):
            return self.encode(text, add_special=False, parse_special=True)
        holders = self._mask.placeholders(list(given), template.source)
        marked = self._marked(lambda find: render(mark=lambda s: holders.put(s, find(s))), holders, text)
        if self._mask.found(marked) == self._mask.found(text):
            return self.encode(text, add_special=False, parse_special=True)
        return self._encode_between(self._control_spans(marked), text)

    def _usable_template(self) -> ChatTemplate:
        if isinstance(self._template, ChatTemplateError):
            raise self._template
        return self._template

    def _marked(
        self, render: Callable[[Callable[[str], set[int]]], str], holders: Placeholders, text: str
    ) -> str:
        """Render with stand-ins in the given texts, so that only the template's control tokens are left.

        Every character is at its position in `text`, the plain rendering.
        """
        refusal = ChatTemplateError(
            "a message, tool or variable holds the text of a control token, and the model's chat template "
            "treats it as one; take it out, or ask for special tokens to be parsed"
        )
        try:
            strict = render(self._mask.every_start)
            if holders.restore(strict) == text:
                return strict
            # The template looks into the texts, say for "</think>" or a schema's "object". It may see more
            # of them, as long as that makes no control token.
            own = self._mask.found(strict)
            for find in (self._mask.tokens_and_continuation, self._mask.whole_tokens):
                lighter = render(find)
                if holders.restore(lighter) == text and self._mask.found(lighter) == own:
                    return lighter
        except ChatTemplateError as error:
            raise refusal from error
        raise refusal

    def _control_spans(self, text: str) -> list[tuple[int, int, int]]:
        """Where the control tokens of a text are: first character, one after the last, id."""
        encoding = self._parsing.encode(text, add_special_tokens=False)
        return [
            (start, end, token_id)
            for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if token_id in self.special_ids
        ]

    def _encode_between(self, spans: list[tuple[int, int, int]], text: str) -> list[int]:
        """Encode what is between control tokens as plain text.

        The library cuts a text at added tokens before anything else, so the pieces' ids are the whole's.
        """
        ids: list[int] = []
        done = 0
        for start, end, token_id in [*spans, (len(text), len(text), -1)]:
            if start > done:
                tokenizer = self._inner if done else self._plain
                ids += tokenizer.encode(text[done:start], add_special_tokens=False).ids
            if token_id >= 0:
                ids.append(token_id)
            done = end
        return ids


class _Decoding:
    """How token texts stand for bytes: byte-level characters, or SentencePiece pieces with byte tokens."""

    def __init__(self, decoder: object) -> None:
        steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
        kinds = [step.get("type") for step in steps if isinstance(step, dict)]
        self._is_byte_level = kinds == ["ByteLevel"]
        by_kind = dict(zip(kinds, steps, strict=True))
        allowed = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
        if not self._is_byte_level and not ({"Replace", "Metaspace"} & set(kinds) and set(kinds) <= allowed):
            raise CheckpointError(
                f"the tokenizer decodes by {kinds or 'nothing'}; supported are ByteLevel, and "
                f"SentencePiece's Replace, ByteFallback, Fuse, Strip or Metaspace"
            )
        metaspace = by_kind.get("Metaspace", {})
        self.strips_first_space = "Strip" in kinds or (
            "Metaspace" in kinds and metaspace.get("prepend_scheme", "always") != "never"
        )

    def token_bytes(self, text: str) -> bytes:
        if self._is_byte_level:
            try:
                return bytes(map(_BYTES.__getitem__, text))
            except KeyError:
                return text.encode()
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes.fromhex(byte[1]) if byte else text.replace("▁", " ").encode()


def _byte_values() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 for itself, the rest from U+0100 in order."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in shown)
    return {chr(byte): byte for byte in shown} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_values()


def _load(text: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"the model's tokenizer cannot be loaded: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _without_parsing(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Make a tokenizer to which control tokens in a text are text; the two share all that is large."""
    plain = tokenizers.Tokenizer(tokenizer.model)
    plain.normalizer = tokenizer.normalizer
    plain.pre_tokenizer = tokenizer.pre_tokenizer
    plain.post_processor = tokenizer.post_processor
    plain.decoder = tokenizer.decoder
    added = tokenizer.get_added_tokens_decoder()
    plain.add_tokens([added[token_id] for token_id in sorted(added)])
    if plain.get_added_tokens_decoder() != added:
        raise CheckpointError("the model's tokenizer numbers its added tokens in no order; renumber them")
    plain.encode_special_tokens = True
    return plain


def _without_first_space(document: dict[str, Any]) -> tokenizers.Tokenizer | None:
    """Make the plain tokenizer of a text that goes on after a control token, if that is another one.

    A Metaspace that puts a space before the first word alone would take each piece for a beginning.
    """
    pre = document.get("pre_tokenizer")
    steps = [pre, *pre.get("pretokenizers", [])] if isinstance(pre, dict) else []
    first = [step for step in steps if isinstance(step, dict) and step.get("prepend_scheme") == "first"]
    if not first:
        return None
    for step in first:
        step["prepend_scheme"] = "never"
    inner = _load(json.dumps(document))
    inner.encode_special_tokens = True
    return inner


def _template(vocabulary: Vocabulary) -> ChatTemplate:
    if vocabulary.chat_template is None:
        raise ChatTemplateError("the model has no chat template; send a text or token ids as the prompt")
    return ChatTemplate(
        vocabulary.chat_template, bos_token=vocabulary.bos_token, eos_token=vocabulary.eos_token
    )
