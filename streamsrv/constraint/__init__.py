"""Structured output: a language that an output must be a text of, as masks over the next token.

`spec` is what a caller asks for, and needs no library; `compiler`, `state` and `mask` are for the worker.
"""
