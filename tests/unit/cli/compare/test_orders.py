"""Runs of a comparison, and orders that are refused."""

from pathlib import Path

import pytest

from hypergpu.cli.compare.order import all_errands, checked_order, errands, strategy_words
from hypergpu.cli.compare.running import RunPlace, kept_report
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError
from tests.unit.cli.compare.given import ORDER


def test_every_seed_of_every_strategy_is_run_one_seed_after_the_other() -> None:
    names = [each.name for each in all_errands(ORDER._replace(strategies=("diloco", "aware")))]
    assert names == ["diloco-1", "aware-1", "diloco-2", "aware-2"]


def test_sync_is_counted_on_a_lan_and_timed_over_the_links() -> None:
    near, steps = errands(ORDER._replace(backend="tunnel"), "sync", 3)
    assert "--lan" in near.words
    assert near.words[-2:] == ("--target", "0.9")
    assert "--lan" not in steps.words
    assert steps.words[-6:] == ("--backend", "tunnel", "--target", "0", "--rounds", "21")
    assert (near.name, steps.name) == ("sync-3-lan", "sync-3-steps")


def test_sync_without_a_number_of_steps_is_run_whole() -> None:
    (whole,) = errands(ORDER._replace(sync_steps=0, backend="tunnel"), "sync", 3)
    assert whole.words[-4:] == ("--backend", "tunnel", "--target", "0.9")


def test_without_a_target_the_jobs_own_is_taken() -> None:
    (only,) = errands(ORDER._replace(target=None), "aware", 1)
    assert "--target" not in only.words


def test_the_baseline_is_sync_or_the_first() -> None:
    assert ORDER._replace(strategies=("aware", "sync")).baseline == "sync"
    assert ORDER._replace(strategies=("diloco", "aware")).baseline == "diloco"


def test_words_are_parted_by_commas() -> None:
    assert strategy_words("sync, aware,") == ("sync", "aware")


@pytest.mark.parametrize(
    ("strategies", "backend", "said"),
    [
        (("awre",), "proxy", 'did you mean "aware"'),
        (("x",), "proxy", "choose from sync, fedavg, diloco"),
        ((), "proxy", "nothing to compare"),
        (("sync", "sync"), "proxy", "named twice"),
        (("sync",), "world", "choose one of proxy, tunnel"),
    ],
)
def test_what_names_nothing_is_refused(
    strategies: tuple[str, ...], backend: str, said: str
) -> None:
    with pytest.raises(HyperGPUError, match=said):
        checked_order(ORDER._replace(strategies=strategies, backend=backend))


@pytest.mark.parametrize("kept", [b"", b"{}", b'{"key": "\xff"}'])
def test_a_kept_report_that_cannot_be_read_is_made_again(tmp_path: Path, kept: bytes) -> None:
    (errand, *_) = all_errands(ORDER)
    place = RunPlace(tmp_path / errand.name)
    place.folder.mkdir()
    place.report.write_bytes(kept)
    assert kept_report(errand, digest_of(b"inputs"), tmp_path) is None
