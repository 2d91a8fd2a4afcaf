"""What runs in a peer's own environment: the standard library and that peer's packages, nothing of ours."""
