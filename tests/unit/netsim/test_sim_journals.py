"""Digests of seeded journals: by them a change shows that it changes no behaviour."""

import re

import pytest

from netsim.sim import main

LINE = re.compile(r"seed (\d+): (job-\S+) ([0-9a-f]{64})")


def digests_of(capsys: pytest.CaptureFixture[str], seed: int) -> list[str]:
    """Digests that the command prints for a seed."""
    assert main(["--seed", str(seed), "--journals"]) == 0
    matches = LINE.findall(capsys.readouterr().out)
    assert matches
    assert {number for number, _, _ in matches} == {str(seed)}
    return [digest for _, _, digest in matches]


def test_the_same_seed_writes_the_same_journals(capsys: pytest.CaptureFixture[str]) -> None:
    assert digests_of(capsys, 1) == digests_of(capsys, 1)


def test_another_seed_writes_other_journals(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(digests_of(capsys, 1)).isdisjoint(digests_of(capsys, 2))


def test_digests_are_printed_only_where_they_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--seed", "1"]) == 0
    assert not LINE.search(capsys.readouterr().out)
