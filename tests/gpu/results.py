"""What a check found, and the report of all of them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from rich.table import Table


class Status(Enum):
    """How a check ended."""

    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"
    """It could not be made here; the findings say why."""


@dataclass(frozen=True, slots=True)
class Result:
    """One check."""

    name: str
    status: Status
    findings: str
    """What was measured or went wrong."""
    took_s: float


def as_table(results: Sequence[Result]) -> Table:
    """Lay the report out for people."""
    table = Table("check", "", "found", "s")
    colours = {Status.PASS: "green", Status.FAIL: "red", Status.SKIP: "yellow"}
    for result in results:
        status = f"[{colours[result.status]}]{result.status.value}[/]"
        table.add_row(result.name, status, result.findings, f"{result.took_s:.0f}")
    return table


def as_json(results: Sequence[Result]) -> str:
    """Lay the report out for programs."""
    rows = [asdict(result) | {"status": result.status.value} for result in results]
    return json.dumps({"passed": all(r.status is not Status.FAIL for r in results), "checks": rows}, indent=1)
