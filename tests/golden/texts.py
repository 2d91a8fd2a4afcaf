"""Texts that are hard to tokenize, always the same ones."""

import random

_WORDS = [
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "is",
    "you",
    "that",
    "it",
    "he",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "I",
    "at",
    "be",
    "this",
    "have",
    "from",
    "or",
    "one",
    "had",
    "by",
    "word",
    "but",
    "not",
    "what",
    "all",
    "were",
    "we",
    "when",
    "your",
    "can",
    "said",
    "there",
    "use",
    "an",
    "each",
    "which",
    "she",
    "do",
    "how",
    "their",
    "if",
    "will",
    "don't",
    "I'm",
    "we've",
    "they'll",
    "it'd",
    "HELLO",
    "World",
    "camelCase",
    "snake_case",
    "Größe",
    "naïve",
    "été",
]

_CODE = (
    "def f(x):\n    return x**2\n",
    'for (int i = 0; i < n; ++i) {\n\tprintf("%d\\n", a[i]);\n}\n',
    "SELECT * FROM t WHERE a >= 10 AND b LIKE '%x%';",
    '<div class="a">&nbsp;</div>\r\n',
    '{"key": [1, 2.5e-3, null, true]}',
    'class A(B):\n    """doc"""\n\n    def __init__(self) -> None:\n        self.x = {}\n',
    "fn main() { let v: Vec<u8> = vec![0; 16]; }",
    '$ ls -la | grep -v "^d" && echo ok',
    "\u03bb x \u2192 x + 1 \u2200\u03b5>0",
    '```python\nprint("hi")\n```\n',
    "a != b; c == d; e <= f; g => h; ++i; --j; x ||= y; z ??= 1",
    "\\begin{align} \\frac{a}{b} &= \\sum_{i=0}^{n} x_i^2 \\end{align}",
)

_URLS = (
    "https://example.com/a/b?x=1&y=%20#frag",
    "http://[::1]:8080/",
    "user@mail.example.org",
    "file:///etc/passwd",
    "C:\\Users\\me\\x.txt",
)

_EMOJI = (
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\U0001f3f3\ufe0f\u200d\U0001f308",
    "\U0001f44d\U0001f3fd",
    "\U0001f1e9\U0001f1ea",
    "1\ufe0f\u20e3",
    "\u2764\ufe0f\u200d\U0001f525",
    "\U0001f9d1\U0001f3ff\u200d\U0001f4bb",
    "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
)

_SPACES = (
    *(" ", "  ", "   ", "        ", "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r\n", "\r", "\r\n\r\n"),
    *(" \n", "\n ", "\n  \n", " \t ", "\u00a0", "\u2003", "\u3000", "\u200b", "\u0085", "\u2028", "\x0b"),
    *("\x0c", "\x1c", "\x1f"),
)

_CONTROL_LIKE = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<file_sep>", "<jupyter_code>"),
    *("<|im_start", "im_end|>", "<|im_|im_end|>end|>", "<s>", "</s>", "<unk>", "[INST]", "<0x0A>"),
    *("<|eot_id|>", "<|im_start|>assistant\n", "<|im_end|><|im_end|>", "<s><s>", "<|IM_END|>"),
)

_BLOCKS = {
    "han and kana": ((0x4E00, 0x9FFF), (0x3040, 0x30FF), (0x3000, 0x303F), (0xFF00, 0xFFEF)),
    "hangul": ((0xAC00, 0xD7A3), (0x1100, 0x11FF)),
    "arabic": ((0x600, 0x6FF), (0x660, 0x669), (0x64B, 0x65F)),
    "hebrew": ((0x590, 0x5F4),),
    "cyrillic": ((0x400, 0x4FF),),
    "greek": ((0x370, 0x3FF),),
    "latin": ((0xA0, 0x24F),),
    "devanagari": ((0x900, 0x97F),),
    "thai": ((0xE00, 0xE7F),),
    "combining": ((0x300, 0x36F),),
    "punctuation": ((0x2000, 0x206F), (0x2E00, 0x2E4F)),
    "mathematics": ((0x2200, 0x22FF), (0x1D400, 0x1D7FF)),
    "pictures": ((0x1F300, 0x1F64F), (0x1F680, 0x1F6C5), (0x1F900, 0x1F9FF), (0x2600, 0x27BF)),
    "numbers": ((0x2150, 0x218B), (0x2460, 0x249B), (0xB2, 0xB3), (0x966, 0x96F)),
    "private": ((0xE000, 0xE0FF), (0xF0000, 0xF00FF)),
    "control": ((0x00, 0x1F), (0x7F, 0x9F)),
    "anything": ((0x1, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10D3F)),
}


def make_texts(count: int, seed: int) -> list[str]:
    """Make texts of all these kinds mixed."""
    rng = random.Random(seed)
    texts = ["", " ", "  ", "\n", "a", "\x00", "\x00a\x00", "\u2581", " \u2581 a\u2581b"]
    while len(texts) < count:
        between = rng.choice(("", " ", "\n", ""))
        parts = [_part(rng) for _ in range(rng.randint(1, 5))]
        texts.append(rng.choice(("", " ", "")) + between.join(parts))
    return texts


def _part(rng: random.Random) -> str:
    kind = rng.randrange(14)
    if kind <= 1:
        return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(1, 8)))
    if kind <= 6:
        return rng.choice((_CODE, _URLS, _EMOJI, _SPACES, _CONTROL_LIKE)[kind - 2])
    if kind == 7:
        return rng.choice(_SPACES) * rng.randint(2, 5)
    if kind <= 9:
        blocks = _BLOCKS[rng.choice(list(_BLOCKS))]
        return "".join(chr(rng.randint(*rng.choice(blocks))) for _ in range(rng.randint(1, 8)))
    if kind == 10:
        return _number(rng)
    if kind == 11:
        return "".join(rng.choice(".,;:!?\"'()[]{}<>|/\\@#$%^&*-_=+`~") for _ in range(rng.randint(1, 10)))
    if kind == 12:
        quote, end = (
            rng.choice("\"'\u201c\u2019"),
            rng.choice(("'s", "'S", "'ll", "'RE", "\u2019s", ".", "!?")),
        )
        return quote + rng.choice(_WORDS) + end
    return rng.choice("abcAB 0\u00e9\u65e5\n") * rng.randint(2, 20)


def _number(rng: random.Random) -> str:
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 12)))
    return rng.choice(
        (
            digits,
            f"{digits}.{digits}",
            f"{rng.randrange(10**9):,}",
            f"0x{rng.getrandbits(32):X}",
            f"-{digits}%",
        )
    )
