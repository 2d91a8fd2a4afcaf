"""Markdown, for standard output and so for a README."""

import statistics
from collections.abc import Sequence as Seq


def section(title: str, text: str, headings: Seq[str], rows: Seq[Seq[str]]) -> str:
    """Lay out a title, what was done, and a table whose first column is text and the others numbers."""
    rule = ["---", *(["--:"] * (len(headings) - 1))]
    lines = ["| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows)]
    return "\n".join([f"### {title}", "", text, "", *lines, ""])


def median_and_range(ratios: Seq[float]) -> str:
    """The median in bold, with the least and the greatest."""
    return f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f}-{max(ratios):.2f})"
