"""A checkpoint's tokenizer, whatever its format, as the text of a Hugging Face `tokenizer.json`."""

from engines.gguf_vocabulary import vocabulary_from_gguf
from engines.hf_vocabulary import vocabulary_from_hf

__all__ = ["vocabulary_from_gguf", "vocabulary_from_hf"]
