"""The second floor: FastAPI on uvicorn that streams texts it holds as server-sent events.

    python -m streamsrv.bench.frontend.sse_server FILE

FILE is a JSON list of texts, one a token. POST /v1/chat/completions?tokens=N sends them, N an event, as
`chat.completion.chunk` lines. There is no engine and no queue behind it, and no model class of pydantic: the
least that such a server does for a token.
"""

import importlib.util
import json
import socket
import sys
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from streamsrv.bench.suite.sse import sse_events

PATH = "/v1/chat/completions"


def is_installed() -> bool:
    """Whether what it is made of is there."""
    return all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn"))


def parser() -> str:
    """What parses HTTP in uvicorn: the fast one where it is installed."""
    return "httptools" if importlib.util.find_spec("httptools") else "h11"


def merged(pieces: Seq[str], num_tokens: int) -> list[str]:
    """Join so many pieces at a time."""
    return ["".join(pieces[i : i + num_tokens]) for i in range(0, len(pieces), num_tokens)]


def make_app(pieces: Seq[str]) -> Any:
    """Make the application."""
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse

    app = FastAPI(openapi_url=None)

    @app.post(PATH)
    async def complete(tokens: int = 1) -> Any:
        async def events() -> AsyncIterator[bytes]:
            texts = merged(pieces, tokens)
            for event in sse_events(texts, "scripted", "length", 2, num_completion_tokens=len(pieces)):
                yield event

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def main() -> None:
    """Serve until a signal, on a free port of 127.0.0.1."""
    import uvicorn

    pieces = json.loads(Path(sys.argv[1]).read_text())
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(f"listening on 127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(
        make_app(pieces), loop="uvloop", http=parser(), lifespan="off", log_level="error", access_log=False
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
