"""Token texts that are known to be control tokens, for vocabularies that do not say so themselves."""

END_TEXTS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "</s>",
        "<eos>",
        "[EOS]",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_turn>",
        "<turn|>",
        "<end_of_utterance>",
        "<|tool_response>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[e~[",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
"""End a text, a turn or a message. The same as in llama.cpp's list of tokens that end generation."""

FILE_END_TEXTS = frozenset(
    {
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<PAD>",
        "[PAD]",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
    }
)
"""Begin the next file or repository: a model that writes one has finished what it was asked for."""

FILL_IN_TEXTS = frozenset(
    {
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<MID>",
        "<|code_middle|>",
        "<|middle|>",
    }
)
"""Name the parts around a gap to be filled."""

CONTROL_TEXTS = END_TEXTS | FILE_END_TEXTS | FILL_IN_TEXTS


def ends_message_only(texts: frozenset[str]) -> bool:
    """Whether "<|end|>" only ends a message of several that make up an answer, beside these control texts."""
    return {"<|return|>", "<|call|>"} <= texts or (
        "<|flush|>" in texts and not texts.isdisjoint({"<|call|>", "<|calls|>"})
    )
