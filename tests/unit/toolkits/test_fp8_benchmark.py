"""The figures of the fp8 benchmark, by hand; its trainings are the quickstart's."""

from pathlib import Path

import pytest

from toolkits.benchmarks import fp8
from toolkits.benchmarks.fp8 import BF16, CONTENDERS, Trained, aims_of, figures_table

HYBRID = "tensorwise, hybrid"
FOUND = {
    BF16: [Trained([4.0] * 100 + [1.0] * 50, 99.0, 100.0), Trained([2.0] * 100 + [3.0] * 50, 97.0, 120.0)],
    HYBRID: [Trained([5.0] * 100 + [1.5] * 50, 98.5, 200.0), Trained([2.0] * 100 + [3.5] * 50, 94.5, 200.0)],
}


def test_the_table_has_the_means_of_blocks_and_seeds():
    lines = [line.split("|")[1:-1] for line in figures_table(FOUND).splitlines()]
    rows = {title.strip(): [cell.strip() for cell in cells] for title, *cells in lines}
    assert rows["1 to 100"] == ["3.0000 +- 1.4142", "3.5000 +- 2.1213"]
    assert rows["101 to 200"] == ["2.0000 +- 1.4142", "2.5000 +- 1.4142"]
    assert rows["exact match, %"] == ["98.0 +- 1.4", "96.5 +- 2.8"]
    assert rows["of each seed"] == ["99.0 97.0", "98.5 94.5"]
    assert rows["points behind bf16"] == ["0.00 +- 0.00", "1.50 +- 1.41"]
    assert rows["CPU seconds"] == ["110 +- 14", "200 +- 0"]
    (aim,) = aims_of(FOUND)
    assert aim.measured == 1.5 and not aim.is_met and "mean of 2 seeds" in aim.name


def test_trainings_whose_figures_are_there_are_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        for number, name in enumerate(CONTENDERS):
            file = tmp_path / f"seed_{seed}" / f"{name.replace(', ', '_')}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(f'{{"losses": [2.0, 1.0], "percent": {99 - number}, "cpu_seconds": 1}}')
    plot, report = tmp_path / "fp8.png", tmp_path / "fp8.json"
    paths = ["--output", str(tmp_path), "--plot", str(plot), "--json", str(report)]
    assert fp8.main(["--seeds", "2", *paths]) == 0
    last = capsys.readouterr().out.rsplit("mean loss of steps", 1)[1]
    assert last.count("MISSED") == 3 and last.count("met   ") == 1
    assert plot.exists() and "tensorwise, e4m3" in report.read_text()
