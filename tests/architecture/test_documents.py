"""What the README and other documents claim holds: tree, commands and figures.

The README's tree is a fenced block marked ``tree``, each line a path, two spaces, a comment. A row
of figures ends with a benchmark's name and the keys of its figures.
"""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.ours.table import read_rows
from hypergpu.user.cli.main import app
from tests.architecture.tree import ROOT, files, one_per_line

README = (ROOT / "README.md").read_text(encoding="utf-8")
ANVIL = "node_modules/.installed"


def code() -> str:
    """Return what the README shows in fences and in backticks."""
    fences = re.findall(r"^```[a-z]*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", README)
    return "\n".join([*fences, *inline])


def tree_paths() -> list[str]:
    block = re.search(r"^```tree\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [line.split()[0] for line in block[1].splitlines() if line.strip()] if block else []


def commands() -> list[tuple[str, ...]]:
    """Return the words of each `hypergpu` command up to its first option or value."""
    command_texts = re.findall(r"(?:^|\s|\$ )hypergpu((?: [a-z]+)+)", code(), re.MULTILINE)
    return sorted({tuple(words.split()) for words in command_texts})


def test_the_tree_is_there() -> None:
    assert tree_paths()


def test_every_path_of_the_tree_exists() -> None:
    assert [path for path in tree_paths() if not (ROOT / path).exists()] == []


def test_every_top_level_folder_is_in_the_tree() -> None:
    folders = {path.parts[0] for path in files() if len(path.parts) > 1}
    shown_folders = {Path(path).parts[0] for path in tree_paths()}
    assert {folder for folder in folders if not folder.startswith(".")} - shown_folders == set()


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", code())) - targets == set()


def test_commands_that_settle_install_a_chain_first() -> None:
    """Without one, the demo would keep receipts and pay nobody."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    needs = dict(re.findall(r"^([a-z-]+):([^#\n]*)", makefile, re.MULTILINE))
    without = [
        name for name in ("demo", "test", "wheel", "bench", "chaos") if ANVIL not in needs[name]
    ]
    assert without == []


def has_help(words: tuple[str, ...]) -> bool:
    return CliRunner().invoke(app, [*words, "--help"]).exit_code == 0


def test_every_command_of_the_readme_exists() -> None:
    assert commands()
    assert [" ".join(words) for words in commands() if not has_help(words)] == []


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
    mistake_list = []
    for figures, (benchmark, *keys) in rows(document):
        path = ROOT / Path("benchmarks/results") / f"{benchmark}.json"
        values = {row.key: row.value for row in read_rows(path)}
        shown_figures = [match[0] for match in NUMBER.finditer(figures)]
        if len(shown_figures) != len(keys):
            mistake_list.append(f"{benchmark}: {figures.strip()} has not {len(keys)} figures")
        mistake_list += [
            f"{benchmark} {key}: {text} is shown, {values.get(key)} was measured"
            for text, key in zip(shown_figures, keys, strict=False)
            if key not in values or not reads_as(values[key], text)
        ]
    return mistake_list


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


def test_every_test_of_the_threat_model_exists() -> None:
    named_tests = set(
        re.findall(r"`(test_\w+)`", (ROOT / "docs/threat-model.md").read_text("utf-8"))
    )
    sources = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    there = {name for text in sources for name in re.findall(r"def (test_\w+)\(", text)}
    assert named_tests
    assert not named_tests - there


def test_every_row_of_the_threat_model_that_promises_something_names_its_test() -> None:
    is_promising = False
    without = []
    for line in (ROOT / "docs/threat-model.md").read_text("utf-8").splitlines():
        if not line.startswith("|"):
            is_promising = False
        elif line.endswith("| test |"):
            is_promising = True
        elif is_promising and not line.startswith("|---") and "`test_" not in line:
            without.append(line)
    assert without == []
