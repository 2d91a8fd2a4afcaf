"""Make sampling.npz: what Hugging Face transformers' processors leave of rows of logits.

Run from the repository's root, in an environment of its own:

    python3 -m venv /tmp/golden && /tmp/golden/bin/pip install torch==2.13.0 transformers==5.24.0
    /tmp/golden/bin/pip install --no-deps --editable .
    /tmp/golden/bin/python -m tests.golden.make_sampling

The processors and their order are those that `generate` makes of a GenerationConfig. transformers has no
presence and frequency penalties: these are OpenAI's definition, after its repetition penalty.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from streamsrv.request import SamplingParams
from tests.golden.sampling import CASES, GOLDEN_SAMPLING, VOCAB_SIZE, Past, past, rows


def lowered(params: SamplingParams, output_ids: tuple[int, ...]) -> torch.Tensor:
    """`count[j] * frequency + (count[j] > 0) * presence`: platform.openai.com/docs."""
    counts = torch.bincount(torch.tensor(output_ids), minlength=VOCAB_SIZE)
    return counts * params.frequency_penalty + (counts > 0) * params.presence_penalty


def generation_config(params: SamplingParams) -> GenerationConfig:
    """Say the same in transformers' words."""
    forbidden = set(range(VOCAB_SIZE)) - params.allowed_token_ids if params.allowed_token_ids else None
    return GenerationConfig(
        do_sample=True,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p or None,
        typical_p=params.typical_p,
        repetition_penalty=params.repetition_penalty,
        sequence_bias=[[[token_id], bias] for token_id, bias in params.logit_bias] or None,
        bad_words_ids=[[token_id] for token_id in params.banned_token_ids] or None,
        suppress_tokens=sorted(forbidden) if forbidden else None,
    )


def distribution(
    model: LlamaForCausalLM, row: NDArray[np.float32], params: SamplingParams, before: Past
) -> NDArray[np.float64]:
    """What is left of each token's probability; in float64, but for the logits' own precision."""
    ids = torch.tensor([before.prompt_ids + before.output_ids])
    config = generation_config(params)
    model._prepare_special_tokens(config)
    processors = model._get_logits_processor(
        config, input_ids_seq_length=ids.shape[1], logits_processor=[], device="cpu"
    )
    num_before = bool(params.logit_bias) + (params.repetition_penalty != 1)
    scores = torch.tensor(row, dtype=torch.float64)[None]
    for processor in processors[:num_before]:
        scores = processor(ids, scores)
    scores = scores - lowered(params, before.output_ids)
    for processor in processors[num_before:]:
        scores = processor(ids, scores)
    return np.asarray(torch.softmax(scores, dim=-1)[0])


def main() -> None:
    """Write the file beside this script."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    golden: dict[str, Any] = {}
    for name, params in CASES.items():
        left = np.stack([distribution(model, row, params, past(row)) for row in rows()])
        print(name, [int((p > 0).sum()) for p in left])
        golden[name] = left.astype(np.float32)
    np.savez_compressed(GOLDEN_SAMPLING, **golden)


if __name__ == "__main__":
    main()
