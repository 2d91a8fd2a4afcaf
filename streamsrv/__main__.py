"""`python -m streamsrv`."""

from streamsrv.cli import main

main()
