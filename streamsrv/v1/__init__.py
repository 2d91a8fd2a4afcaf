"""Generated from proto/streamsrv/v1; see scripts/gen_proto."""
