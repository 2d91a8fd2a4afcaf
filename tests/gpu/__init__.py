"""What only a GPU can show: run `python -m tests.gpu.check` on a machine that has one."""
