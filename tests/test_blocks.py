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


def test_a_named_block_is_kept_until_no_other_is_free() -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    pool.name(1, "one")
    pool.release([0, 1, 2])
    assert pool.num_free == 3
    assert pool.num_kept == 1
    assert pool.allocate(2) == [0, 2]
    assert pool.find("one") == 1
    assert pool.allocate(1) == [1]
    assert pool.find("one") is None
    assert pool.num_evictions == 1


def test_the_least_recently_used_is_given_first() -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    for block in range(3):
        pool.name(block, block)
    pool.release([2, 0, 1])
    pool.take([2])
    pool.release([2])
    assert pool.allocate(3) == [0, 1, 2]


def test_a_block_that_was_found_has_an_owner_more() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.name(0, "a")
    pool.take([0])
    assert pool.is_shared(0)
    pool.release([0])
    pool.check_integrity([[0]])
    pool.release([0], keep=False)
    assert pool.find("a") is None
    assert pool.num_kept == 0


def test_of_blocks_with_equal_content_the_first_has_the_key() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    pool.name(0, "a")
    pool.name(1, "a")
    assert pool.find("a") == 0
    pool.check_integrity([[0], [1]])
