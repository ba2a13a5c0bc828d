import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.shell.blobs.space import Space
from hypergpu.errors import HyperGPUError

ROOT = Path(__file__).parents[3]


def fill_disk(what: str, folder: Path) -> list[str]:
    script = Path(__file__).with_name("full_disk.py")
    finished = subprocess.run(
        [sys.executable, str(script), what, str(folder)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return finished.stdout.split()


def test_a_journal_that_cannot_grow_refuses_and_recovers_whole(tmp_path: Path) -> None:
    assert fill_disk("journal", tmp_path) == ["DISK_FULL", "DISK_FULL", "whole"]


def test_a_blob_that_does_not_fit_leaves_nothing_and_fits_later(tmp_path: Path) -> None:
    assert fill_disk("blobs", tmp_path) == ["DISK_FULL", "empty", "whole"]


def test_an_upload_that_hits_the_end_of_the_disk_goes_on_where_it_was(tmp_path: Path) -> None:
    assert fill_disk("upload", tmp_path) == ["DISK_FULL", "100000", "100000", "whole"]


def test_the_last_free_bytes_are_left_to_the_journal(tmp_path: Path) -> None:
    with pytest.raises(HyperGPUError, match="are kept free"):
        Space(tmp_path, keep_free_bytes=2**60).take(1)
