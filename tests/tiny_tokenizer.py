"""A small real byte-level BPE tokenizer, learned from a few sentences; 320 tokens."""

import json
import re
from collections import Counter
from functools import cache
from itertools import pairwise

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2; the 256 bytes and the merges follow."""
END_TOKEN_IDS = (0, 2)
VOCAB_SIZE = 320

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT = """
The river carried the little boats past the town, and the children on the bank waved at them until the
last sail had turned the corner. In the evening the boats would come back with the tide, and the children
would be there again. That is how the summer went: the water, the wind, and the long light on the hills.
"""


def byte_alphabet() -> tuple[str, ...]:
    """Give each byte a printable character, as GPT-2's encoder does."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


@cache
def merges() -> tuple[tuple[str, str], ...]:
    """Learn merges: the most frequent pair of neighbours first, ties in order of the alphabet."""
    alphabet = byte_alphabet()
    text = _TEXT.replace("\n", " ")
    words = [[alphabet[b] for b in word.encode()] for word in re.findall(r" ?\w+", text)]
    learned: list[tuple[str, str]] = []
    while len(SPECIAL_TOKENS) + 256 + len(learned) < VOCAB_SIZE:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        learned.append((left, right))
        for word in words:
            for i in range(len(word) - 2, -1, -1):
                if word[i : i + 2] == [left, right]:
                    word[i : i + 2] = [left + right]
    return tuple(learned)


def tokens() -> tuple[str, ...]:
    """All tokens in order of their ids."""
    return (*SPECIAL_TOKENS, *byte_alphabet(), *(left + right for left, right in merges()))


def tokenizer_json() -> str:
    """Write the tokenizer in the form of a tokenizer.json."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text, **added} for i, text in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {text: i for i, text in enumerate(tokens())},
            "merges": [list(pair) for pair in merges()],
        },
    }
    return json.dumps(document, ensure_ascii=False)
