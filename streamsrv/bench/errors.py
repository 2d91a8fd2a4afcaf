"""What a measurement can fail with."""

from engines.api import StreamsrvError


class BenchError(StreamsrvError):
    """Nothing could be measured; the message says what was in the way."""

    reason = "BENCH_FAILED"
