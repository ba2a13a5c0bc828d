"""Figures in documents: each row ends with a benchmark's name and the keys of its figures."""

import re
from pathlib import Path

import pytest

from benchmarks.house.tree import ROOT, one_per_line
from benchmarks.table import read_rows

ROW = re.compile(r"^\|[^|]*\|([^|]*)\| (`[a-z_]+`(?: `\w+`)+) \|$", re.MULTILINE)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?( %)?")
README_ROWS = 12


def rows(document: str) -> list[tuple[str, list[str]]]:
    """Return each row's figures as text, and the names in its last cell."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return [(figures, re.findall(r"`(\w+)`", names)) for figures, names in ROW.findall(text)]


def reads_as(value: float, shown: str) -> bool:
    """Whether a value, or its percentage, rounds to the number that is shown."""
    number = shown.removesuffix(" %").replace(",", "")
    decimals = len(number.partition(".")[2])
    scales = (1, 100) if shown.endswith(" %") else (1,)
    return any(f"{value * scale:.{decimals}f}" == number for scale in scales)


def mistakes(document: str) -> list[str]:
    found = []
    for figures, (benchmark, *keys) in rows(document):
        path = ROOT / Path("benchmarks/results") / f"{benchmark}.json"
        values = {row.key: row.value for row in read_rows(path)}
        shown = [match[0] for match in NUMBER.finditer(figures)]
        if len(shown) != len(keys):
            found.append(f"{benchmark}: {figures.strip()} has not {len(keys)} figures")
        found += [
            f"{benchmark} {key}: {text} is shown, {values.get(key)} was measured"
            for text, key in zip(shown, keys, strict=False)
            if key not in values or not reads_as(values[key], text)
        ]
    return found


@pytest.mark.parametrize("document", ["README.md", "docs/benchmarks.md"])
def test_every_figure_stands_in_the_results(document: str) -> None:
    assert rows(document)
    assert mistakes(document) == [], one_per_line(mistakes(document))


def test_the_readme_measures_in_few_rows() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Measured")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(table) == len(rows("README.md")) <= README_ROWS


def test_a_value_reads_as_its_rounded_figure() -> None:
    assert reads_as(0.0929, "9.3 %")
    assert reads_as(97.66, "97.7 %")
    assert reads_as(1182.3, "1,182")
    assert not reads_as(43.6, "43")
    assert not reads_as(0.43, "43")
