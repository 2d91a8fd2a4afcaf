"""Where the golden logits are, and what they are of."""

from pathlib import Path

GOLDEN_LOGITS = Path(__file__).with_name("logits.npz")
"""`[tokens, vocab_size]` float32 by the tiny model's name; made by make_logits.py."""

GOLDEN_IDS = tuple((7 + 89 * i + 3 * i * i) % 320 for i in range(40))
"""The tokens, spread over the vocabulary."""
