"""An Anvil for each test, whose blocks the test makes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from payments.shell.anvil import Anvil, AnvilOptions, running_anvil


@pytest.fixture
def anvil(tmp_path: Path) -> Iterator[Anvil]:
    options = AnvilOptions(block_time_s=0)
    with running_anvil(options, log_file=tmp_path / "anvil.log") as anvil_process:
        yield anvil_process
