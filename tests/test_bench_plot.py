import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from streamsrv.bench.errors import BenchError
from streamsrv.bench.load import Arrival, LoadPlan, LoadRun, RequestRecord
from streamsrv.bench.load_messages import Plan
from streamsrv.bench.measure import Measured
from streamsrv.bench.plot import check_plot, write_plot
from streamsrv.bench.report import LoadReport
from streamsrv.bench.schedule import OpenPlan


def measured(plan: Plan, num_tokens: int = 3) -> Measured:
    arrivals = tuple(Arrival(1.0 + 0.1 * i, 1) for i in range(num_tokens))
    record = RequestRecord(0.0, 2.0, 10, arrivals, 50, None, 0.0 if isinstance(plan, OpenPlan) else None)
    concurrency = plan.concurrency if isinstance(plan, LoadPlan) else None
    run = LoadRun(concurrency, 0.0, 2.0, 2.0, (record,))
    return Measured("scripted", "0.1.0", 7, plan, LoadReport.of(run, client_cpu_s=0.1))


def texts(path: Path) -> list[str]:
    root = ET.fromstring(path.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return ["".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_plot_of_concurrencies_is_svg_that_names_all_that_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    write_plot([measured(LoadPlan(n, num_requests=n)) for n in (1, 32, 8)], path)
    found = texts(path)
    for metric in ("time to first token", "inter-token", "end to end"):
        for percent in ("p50", "p90", "p99"):
            assert f"{metric}, {percent}" in found
    assert {"Latency", "milliseconds", "Throughput", "tokens a second", "output", "prompt"} <= set(found)
    assert found.count("concurrent clients") == 2
    assert [text for text in found if text in ("1", "8", "32")][:3] == ["1", "8", "32"]


def test_a_plot_of_rates_says_so(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    write_plot([measured(OpenPlan(rate, num_requests=1)) for rate in (0.5, 2.0)], path)
    found = texts(path)
    assert found.count("requests due a second") == 2
    assert "0.5" in found


def test_a_plot_of_one_load_of_one_token_each_can_be_made(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    write_plot([measured(LoadPlan(4, num_requests=4), num_tokens=1)], path)
    assert "Latency" in texts(path)


def test_equal_numbers_make_equal_files(tmp_path: Path) -> None:
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        write_plot([measured(LoadPlan(n, num_requests=n)) for n in (1, 2)], path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_plot_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    with pytest.raises(BenchError, match=r"cannot write --plot .*folder\.svg: Is a directory"):
        write_plot([measured(LoadPlan(1, num_requests=1))], folder)


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchError, match=r"--plot needs matplotlib .*pip install 'streamsrv\[bench\]'"):
        check_plot(tmp_path / "plot.svg")


def test_looking_whether_a_plot_can_be_written_changes_nothing(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    check_plot(plot)
    assert not plot.exists()
    plot.write_text("an older one")
    check_plot(plot)
    assert plot.read_text() == "an older one"
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    with pytest.raises(BenchError, match=r"cannot write --plot .*folder.svg: Is a directory"):
        check_plot(folder)
