"""Markdown, for standard output and so for a README."""

from collections.abc import Sequence as Seq


def section(title: str, text: str, headings: Seq[str], rows: Seq[Seq[str]]) -> str:
    """Lay out a title, what was done, and a table whose first column is text and the others numbers."""
    rule = ["---", *(["--:"] * (len(headings) - 1))]
    lines = ["| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows)]
    return "\n".join([f"### {title}", "", text, "", *lines, ""])
