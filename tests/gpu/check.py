"""Check the TensorRT engines on a real GPU, and print a report.

    python tests/gpu/check.py [--engine tensorrt_rtx] [--model PATH] [--json FILE]

Meant to take less than ten minutes with the demo model, most of them for building its plan; it has run over
stand-ins only so far. It is no part of the test suite: a machine without a GPU cannot pass it.

Exit codes: 0 everything passed; 1 something failed; 2 the arguments are wrong; 3 there is no GPU that can be
used, or a package is missing, which standard error says.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # of this file's folder when run by its path
    from tests.gpu.run import main

    main(__doc__)
