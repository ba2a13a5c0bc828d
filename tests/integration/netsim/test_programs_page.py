"""docs/netsim/programs.md: its example runs over every backend, its tables name what there is."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from hypergpu.sites import Sites
from netsim.network import control
from tests.integration.netsim.shaped import END_WITHIN_S, OPENABLE

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/netsim/programs.md").read_text("utf-8")


@pytest.mark.parametrize("backend", OPENABLE)
def test_the_example_runs(backend: str) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    program = example.replace("Backend.PROXY", f"Backend.{backend.upper()}")
    run = [sys.executable, "-c", program]
    done = subprocess.run(
        run, cwd=ROOT, capture_output=True, text=True, check=False, timeout=END_WITHIN_S
    )
    assert done.returncode == 0, done.stderr
    assert "fetched" in done.stdout
    assert "VALID" in done.stdout


def test_the_page_names_every_field_of_the_sites() -> None:
    assert [name for name in Sites.__struct_fields__ if f"| `{name}` |" not in PAGE] == []


def test_the_page_names_every_request() -> None:
    kinds = get_args(control.ControlRequest)
    shown = re.findall(r"^\| `(\{.*?\})` \|", PAGE, re.MULTILINE)
    texts = [text.replace("{...}", "null") for text in shown]
    tags = {msgspec.json.decode(text)["type"] for text in texts}
    assert tags == {str(each.__struct_config__.tag) for each in kinds}
