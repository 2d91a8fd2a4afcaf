"""Run one peer in its own environment, and speak JSON lines.

    python worker.py MODULE MODEL THREADS STREAMS CELLS

The first line says {"ready": {...}}, what the module's `describe()` says. Then each line read,
{"prompts": [[ids], ...], "max_tokens": N}, is answered by {"streams": [[token_ids, arrivals], ...]}, with
arrivals [[at_s, num_tokens], ...] counted from the beginning of the run. What fails is answered by
{"error": "..."}.
"""

import importlib
import json
import os
import sys

_MAX_MESSAGE = 300
"""Characters of a library's message: some are pages long, and this is for a cell of a table."""


def main() -> None:
    """Answer commands until standard input ends."""
    # The libraries print to standard output, which is for the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(**values: object) -> None:
        answers.write(json.dumps(values) + "\n")

    name, model, num_threads, num_streams, num_cells = sys.argv[1:]
    try:
        peer = importlib.import_module(name).open_peer(
            model, num_threads=int(num_threads), num_streams=int(num_streams), num_cells=int(num_cells)
        )
    except Exception as error:  # whatever a library raises is for the other side to report
        answer(error=_sentence(error))
        return
    answer(ready=peer.describe())
    for line in sys.stdin:
        command = json.loads(line)
        try:
            streams = peer.run(command["prompts"], command["max_tokens"])
        except Exception as error:
            answer(error=_sentence(error))
        else:
            answer(streams=streams)
    # Some of the libraries hang or crash when they are taken apart, and nothing is left to do.
    os._exit(0)


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:_MAX_MESSAGE]}"


if __name__ == "__main__":
    main()
