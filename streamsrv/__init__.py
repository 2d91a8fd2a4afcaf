"""streamsrv: a gRPC-first streaming inference server for language models."""

from importlib.metadata import version

__version__ = version("streamsrv")
