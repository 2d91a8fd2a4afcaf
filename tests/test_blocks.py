import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamsrv.blocks import BlockPool


def test_a_pool_gives_all_blocks_or_none() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_the_lowest_free_blocks_are_given_first() -> None:
    pool = BlockPool(6)
    assert pool.allocate(6) == list(range(6))
    pool.release([4, 1, 5])
    assert pool.allocate(2) == [1, 4]
    pool.release([0])
    assert pool.allocate(2) == [0, 5]


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_a_block_that_is_free_cannot_be_released() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="free already"):
        pool.release(blocks)


def test_integrity_notices_a_lost_block() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([])


@given(st.lists(st.integers(-5, 8), max_size=60))
def test_the_books_balance_after_any_takes_and_returns(moves: list[int]) -> None:
    pool, owners = BlockPool(20), list[list[int]]()
    for move in moves:
        if move >= 0:
            blocks = pool.allocate(move)
            if blocks is not None:
                owners.append(blocks)
        elif owners:
            pool.release(owners.pop(move % len(owners)))
        pool.check_integrity(owners)
    assert pool.num_free == 20 - sum(map(len, owners))
