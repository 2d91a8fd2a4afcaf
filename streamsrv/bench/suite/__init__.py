"""What `scripts/bench` measures on this machine: `python -m streamsrv.bench.suite`."""
