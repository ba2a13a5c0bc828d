"""What the entries of the built-in workloads say, which cards of exports repeat."""

import pytest

from hypergpu.workloads.entry import BUILT_IN, WorkloadEntry


@pytest.mark.parametrize(
    "entry", [each for each in BUILT_IN if each.kind != "null"], ids=lambda each: each.name
)
def test_every_entry_says_how_samples_are_prepared_and_split(entry: WorkloadEntry) -> None:
    assert entry.preprocessing
    assert entry.split
