from hypothesis import given
from hypothesis import strategies as st

from streamsrv.caller_shares import CallerShares


def test_a_caller_that_comes_starts_level_with_who_has_had_least() -> None:
    shares = CallerShares()
    shares.enter("a")
    shares.enter("b")
    shares.charge("a", 100)
    shares.charge("b", 30)
    shares.enter("c")
    assert shares.num_tokens("c") == 30


def test_what_was_too_much_stays_while_anybody_is_at_work() -> None:
    shares = CallerShares()
    shares.enter("greedy")
    shares.enter("other")
    shares.charge("greedy", 100)
    shares.leave("greedy")
    shares.enter("greedy")
    assert shares.num_tokens("greedy") == 100


def test_all_is_forgotten_when_nobody_is_at_work() -> None:
    shares = CallerShares()
    shares.enter("a")
    shares.charge("a", 100)
    shares.leave("a")
    shares.enter("b")
    assert shares.num_tokens("b") == 0


def test_names_do_not_pile_up() -> None:
    shares = CallerShares()
    shares.enter("stays")
    for number in range(10_000):
        shares.enter(f"caller {number}")
        shares.charge(f"caller {number}", 5)
        shares.charge("stays", 3)
        shares.leave(f"caller {number}")
    assert len(shares) < 200


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcd"), st.integers(0, 9))))
def test_the_books_balance(moves: list[tuple[bool, str, int]]) -> None:
    shares, callers = CallerShares(), list[str]()
    for enters, caller, num_tokens in moves:
        if enters:
            callers.append(caller)
            shares.enter(caller)
        elif caller in callers:
            shares.charge(caller, num_tokens)
            callers.remove(caller)
            shares.leave(caller)
        shares.check_integrity(callers)
