"""Make logits.npz: Hugging Face transformers' logits of the tiny models, in float32.

Run from the repository's root, in an environment of its own:

    python3 -m venv /tmp/golden && /tmp/golden/bin/pip install torch==2.13.0 transformers==5.24.0
    /tmp/golden/bin/python -m tests.golden.make_logits

The models are random but always the same (see tests/tiny.py), so the file changes only if they do.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.golden.logits import GOLDEN_IDS, GOLDEN_LOGITS
from tests.tiny import EVERY_MODEL, GEMMA3_SCALED, write_hf


def main() -> None:
    """Write the file beside this script."""
    logits = {}
    with tempfile.TemporaryDirectory() as root:
        for tiny in (*EVERY_MODEL, GEMMA3_SCALED):
            folder = write_hf(tiny, Path(root) / tiny.name)
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            )
            with torch.no_grad():
                logits[tiny.name] = model(torch.tensor([GOLDEN_IDS])).logits[0].numpy()
            print(tiny.name, logits[tiny.name].shape, float(np.abs(logits[tiny.name]).max()))
    np.savez_compressed(GOLDEN_LOGITS, **logits)


if __name__ == "__main__":
    main()
