"""Runs of a comparison, and orders that are refused."""

from pathlib import Path

import pytest

from hypergpu.cli.compare.runs import kept_report, planned_runs, seed_runs
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError
from tests.unit.cli.compare.given import ORDER


def test_sync_is_counted_on_a_lan_and_timed_over_the_links() -> None:
    near, steps = planned_runs(ORDER._replace(backend="tunnel"), "sync", 3)
    assert "--lan" in near.words
    assert near.words[-2:] == ("--target", "0.9")
    assert "--lan" not in steps.words
    assert steps.words[-6:] == ("--backend", "tunnel", "--target", "0", "--rounds", "21")
    assert (near.name, steps.name) == ("sync-3-lan", "sync-3-steps")


def test_the_baseline_is_sync_or_the_first() -> None:
    assert ORDER._replace(strategies=("aware", "sync")).baseline == "sync"
    assert ORDER._replace(strategies=("diloco", "aware")).baseline == "diloco"


@pytest.mark.parametrize(
    ("strategies", "backend", "said"),
    [
        (("awre",), "proxy", 'did you mean "aware"'),
        (("x",), "proxy", "choose one of sync, fedavg, diloco"),
        ((), "proxy", "nothing to compare"),
        (("sync", "sync"), "proxy", "named twice"),
        (("sync",), "world", "choose one of proxy, tunnel"),
    ],
)
def test_what_names_nothing_is_refused(
    strategies: tuple[str, ...], backend: str, said: str
) -> None:
    with pytest.raises(HyperGPUError, match=said):
        ORDER._replace(strategies=strategies, backend=backend).check()


@pytest.mark.parametrize("kept", [b"", b"{}", b'{"key": "\xff"}'])
def test_a_kept_report_that_cannot_be_read_is_made_again(tmp_path: Path, kept: bytes) -> None:
    (run, *_) = seed_runs(ORDER, 1)
    (tmp_path / run.name).mkdir()
    (tmp_path / run.name / "report.json").write_bytes(kept)
    assert kept_report(run, digest_of(b"inputs"), tmp_path) is None
