"""Checksums of items, and the least time that an item may be given."""

import time
from pathlib import Path

import pytest

from gpu_node.shell.worker.protocol import STEP_FLOOR_MS
from tests.bundles import BundleFolder, counting_texts

ITEMS = 6


@pytest.mark.parametrize("rounds", [1, 2])
def test_an_item_takes_the_step_floor_and_its_value_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    bundles = BundleFolder(tmp_path, "checksum")
    bundles.add_items(counting_texts(ITEMS))
    values = bundles.values(rounds=rounds)
    monkeypatch.setenv(STEP_FLOOR_MS, "10")
    begin_s = time.monotonic()
    assert bundles.values(rounds=rounds) == values
    assert time.monotonic() - begin_s >= ITEMS * 0.01
