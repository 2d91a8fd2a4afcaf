"""streamsrv beside other engines and servers, on the same prompts and processors."""
