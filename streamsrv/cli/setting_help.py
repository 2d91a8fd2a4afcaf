"""What --help says of a setting."""

from enum import Enum

from streamsrv.config import Settings


def setting_help(name: str) -> str:
    """Describe a setting for argparse: what it is, and its default where that is not said."""
    field = Settings.model_fields[name]
    text = (field.description or "").replace("%", "%%")
    default = field.default.value if isinstance(field.default, Enum) else field.default
    if default is None or "default" in text:
        return text
    if isinstance(default, bool):
        default = "yes" if default else "no"
    return f"{text} (default: {default})"
