"""streamsrv: a gRPC-first streaming inference server for language models."""
