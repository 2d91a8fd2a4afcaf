from pathlib import Path

import pytest

from streamsrv.api_keys import ApiKeys, key_line, new_key, parse_api_keys
from streamsrv.errors import SettingsError

PATH = Path("keys")


def keys(text: str) -> ApiKeys:
    return parse_api_keys(text.encode(), PATH)


def test_a_new_key_is_let_in_by_its_line_and_others_are_not() -> None:
    alice, bob, stranger = new_key(), new_key(), new_key()
    known = keys(f"# who\n\n{key_line('alice', alice)}  # since May\n\t{key_line('bob', bob)}\r\n")
    assert len(known) == 2
    assert known.name_of(alice) == "alice"
    assert known.name_of(bob) == "bob"
    for wrong in (stranger, "", alice[:-1], alice + " ", key_line("alice", alice).split()[1], "ключ"):
        assert known.name_of(wrong) is None


def test_keys_are_32_random_bytes_in_characters_that_metadata_can_carry() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(len(key) == 43 and key.isascii() and key.isprintable() and " " not in key for key in made)


def test_the_file_does_not_hold_the_key() -> None:
    key = new_key()
    assert key not in key_line("alice", key)


def test_one_name_may_have_several_keys() -> None:
    old, new = new_key(), new_key()
    known = keys(f"{key_line('alice', old)}\n{key_line('alice', new)}")
    assert known.name_of(old) == known.name_of(new) == "alice"


def test_every_key_is_compared_whichever_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    compared: list[bytes] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return known == given

    first, last = new_key(), new_key()
    known = keys(f"{key_line('first', first)}\n{key_line('middle', new_key())}\n{key_line('last', last)}")
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in (first, last, new_key()):
        known.name_of(key)
        assert len(compared) == 3
        compared.clear()


def test_a_file_without_keys_lets_nobody_in() -> None:
    for text in ("", "# none yet\n"):
        assert len(keys(text)) == 0
        assert keys(text).name_of("") is None


SECRET = "a-key-put-in-as-it-is"


@pytest.mark.parametrize(
    "line",
    [
        SECRET,
        f"alice {SECRET}",
        f"alice {'0' * 63}",
        f"alice {'0' * 65}",
        f"alice {'g' * 64}",
        f"alice {'0' * 64} more",
        f"-alice {'0' * 64}",
        f"{'a' * 65} {'0' * 64}",
        f"al\xefce {'0' * 64}",
    ],
)
def test_a_wrong_line_is_named_by_its_number_and_not_quoted(line: str) -> None:
    with pytest.raises(SettingsError, match="keys, line 3: it must be NAME SHA256") as caught:
        keys(f"# keys\nbob {'1' * 64}\n{line}\n")
    assert SECRET not in str(caught.value)
    with pytest.raises(SettingsError, match="line 1"):
        parse_api_keys(b"\xff\xfe\x00", PATH)


def test_a_key_that_is_there_twice_is_refused() -> None:
    key = new_key()
    with pytest.raises(SettingsError, match="keys, line 2: the key of bob is there twice"):
        keys(f"{key_line('alice', key)}\n{key_line('bob', key)}")


@pytest.mark.parametrize("name", ["", "two words", "#", "-n", "a" * 65, "naïve", "a\n"])
def test_a_name_that_a_line_could_not_hold_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="is no name for a key; it must have 1 to 64 letters"):
        key_line(name, "key")
