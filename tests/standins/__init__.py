"""Stand-ins for a GPU's libraries on host memory: real implementations that enforce the real rules."""
