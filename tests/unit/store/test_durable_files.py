"""A file that is there whole or not at all, by the one writer that every program has."""

import re
from pathlib import Path

import pytest

from benchmarks.house.tree import ROOT, handwritten_files
from hypergpu.files import SHARED, fill_durably, write_durably

HOME = Path("hypergpu/files.py")


def test_a_file_replaces_another_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("old")
    write_durably(path, b"new")
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == ["key"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_a_crash_left_beside_it_is_taken_away(tmp_path: Path) -> None:
    (tmp_path / ".key.new").write_text("half of i")
    write_durably(tmp_path / "key", b"it", mode=SHARED)
    assert [each.name for each in tmp_path.iterdir()] == ["key"]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("old")
    (tmp_path / ".key.new").mkdir()
    with pytest.raises(OSError, match="key"):
        write_durably(path, b"new")
    assert path.read_text() == "old"


def test_a_file_that_somebody_else_fills_takes_its_place_whole(tmp_path: Path) -> None:
    def fill(beside: Path) -> None:
        assert not (tmp_path / "end").exists()
        beside.write_text("all")

    fill_durably(tmp_path / "end", fill)
    assert (tmp_path / "end").read_text() == "all"
    assert [each.name for each in tmp_path.iterdir()] == ["end"]


def test_nobody_else_syncs_a_folder_after_a_rename() -> None:
    """Blobs aside, whose files are written over in place."""
    folders = re.compile(r"O_DIRECTORY|os\.open\([^)]*(parent|folder)")
    others = {
        str(path)
        for path in handwritten_files()
        if path.suffix == ".py"
        and path.parts[0] in {"hypergpu", "coordinator", "gpu_node"}
        and "os.fsync" in (text := (ROOT / path).read_text("utf-8"))
        and folders.search(text)
    }
    assert others - {"coordinator/shell/blobs/files.py"} == {str(HOME)}
