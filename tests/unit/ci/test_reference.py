"""`make api` builds the reference of the Python client from its docstrings."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.full
def test_the_reference_has_what_users_import() -> None:
    pages = ROOT / "build" / "api" / "hypergpu"
    shutil.rmtree(pages.parent, ignore_errors=True)
    subprocess.run(["make", "api"], cwd=ROOT, check=True, capture_output=True)
    assert "held_out" in (pages / "user" / "training" / "train.html").read_text("utf-8")
    assert "connect" in (pages / "client.html").read_text("utf-8")
