"""What only a GPU can show: run `python tests/gpu/check.py` on a machine that has one."""
