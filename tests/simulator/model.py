"""A model whose next token depends on all tokens before it, and on nothing else."""

VOCABULARY = 5  # few, so that prompts meet and guesses come true
_MASK = (1 << 61) - 1


def chain(state: int, token_id: int) -> int:
    """What a cell of the cache holds: a digest of its token and of all before it."""
    return (state * 6364136223846793005 + token_id * 1442695040888963407 + 1013904223) & _MASK


def next_token(state: int) -> int:
    """The token after those with this digest."""
    return (state >> 23) % VOCABULARY


def origin(space: int) -> int:
    """The digest of no token, another one for each of those who must not share."""
    return chain(7, space)
