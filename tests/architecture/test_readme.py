"""The README's tree is a fenced block marked ``tree``, each line a path, two spaces, a comment."""

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.house.tree import ROOT, files

README = (ROOT / "README.md").read_text(encoding="utf-8")
ANVIL = "node_modules/.installed"
COMMAND = "from hypergpu.cli.main import main; main()"


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
    found = re.findall(r"(?:^|\s|\$ )hypergpu((?: [a-z]+)+)", code(), re.MULTILINE)
    return sorted({tuple(words.split()) for words in found})


def test_the_tree_is_there() -> None:
    assert tree_paths()


def test_every_path_of_the_tree_exists() -> None:
    assert [path for path in tree_paths() if not (ROOT / path).exists()] == []


def test_every_top_level_folder_is_in_the_tree() -> None:
    folders = {path.parts[0] for path in files() if len(path.parts) > 1}
    shown = {Path(path).parts[0] for path in tree_paths()}
    assert {folder for folder in folders if not folder.startswith(".")} - shown == set()


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
    argv = [sys.executable, "-c", COMMAND, *words, "--help"]
    return subprocess.run(argv, cwd=ROOT, check=False, capture_output=True).returncode == 0


def test_every_command_of_the_readme_exists() -> None:
    assert commands()
    assert [" ".join(words) for words in commands() if not has_help(words)] == []
