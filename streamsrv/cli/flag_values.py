"""What the values of flags may be: refused with the flag's name and what is allowed."""

from streamsrv.errors import SettingsError

MAX_UINT32 = 2**32 - 1


def check_whole(flag: str, value: int | None, least: int, most: int = MAX_UINT32) -> None:
    """Refuse a whole number that is given and out of its range.

    Raises:
        SettingsError: it is.
    """
    if value is not None and not least <= value <= most:
        raise SettingsError(f"{flag} is {value}; it must be a whole number from {least} to {most}")


def check_seconds(flag: str, value: float | None, most: float, *, may_be_0: bool = False) -> None:
    """Refuse a time that is given and out of its range.

    Raises:
        SettingsError: it is, or it is no number.
    """
    if value is None or (0 <= value <= most if may_be_0 else 0 < value <= most):
        return
    allowed = f"a number of seconds from 0 to {most:.0f}"
    if not may_be_0:
        allowed = f"a number of seconds above 0 and at most {most:.0f}"
    raise SettingsError(f"{flag} is {value:g}; it must be {allowed}")


def check_text(name: str, value: str | None) -> None:
    """Refuse a text that is given and holds bytes that are no UTF-8, which Python hides in surrogates.

    Raises:
        SettingsError: it does.
    """
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise SettingsError(f"{name} is not UTF-8 text (at character {error.start})") from None
