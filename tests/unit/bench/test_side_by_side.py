"""Comparisons by turns: with the build before, a centralised cluster, a world without failures."""

import subprocess
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.before import EARLIER, MUON, SAME, metrics_of
from benchmarks.centralised import first_evaluation_s, shares
from benchmarks.ours.awareness.before import require_commit
from benchmarks.ours.awareness.centralised import DdpOutcome
from benchmarks.ours.awareness.goodput import crashes
from benchmarks.ours.awareness.runs import GRADES, LateError, NotReachedError, by_turns
from benchmarks.ours.cluster import BenchmarkError
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.user.client.history import EvaluationPoint
from netsim.measure.lateness import ALWAYS_VALID
from netsim.network.world_file import read_world_file
from netsim.run.report import RunReport


def test_a_clone_without_the_commit_is_told_the_fix(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    with pytest.raises(BenchmarkError, match=r"Fix: git fetch --unshallow"):
        require_commit(tmp_path)


def test_contenders_take_turns_and_a_late_seed_counts_for_none() -> None:
    calls: list[tuple[str, int]] = []

    def measure(name: str, seed: int) -> float:
        calls.append((name, seed))
        if (name, seed) == ("b", 2):
            raise LateError("b was late")
        return float(seed)

    seconds = by_turns({name: partial(measure, name) for name in "ab"}, (1, 2))
    assert calls == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert seconds == {"a": [1.0], "b": [1.0]}
    with pytest.raises(LateError):
        by_turns({"b": partial(measure, "b")}, (2,))


def test_the_build_before_is_over_this_one() -> None:
    metrics = metrics_of("c", {EARLIER: [30.0, 40.0, 50.0], SAME: [20.0], MUON: [10.0]})
    assert metrics == {
        "tta_over_before_c": 2.0,
        "tta_over_before_c_same_optimizer": 2.0,
        "tta_over_before_c_muon": 4.0,
    }


def test_a_share_of_the_cluster_is_its_time_over_ours() -> None:
    every = shares("a", {"ours": [40.0], "adamw": [30.0], "muon": [20.0]})
    assert every == {"centralised_share_a": 0.75, "centralised_share_a_same_optimizer": 0.5}
    assert DdpOutcome(steps=100, seconds=20.5, metric=0.97).utilisation == pytest.approx(
        0.9756, 1e-3
    )


def test_ours_is_timed_to_the_first_evaluation_at_the_target() -> None:
    points = tuple(
        EvaluationPoint(
            round=number,
            at_ms=Milliseconds(1000 * number),
            metric=metric,
            samples=Samples(0),
            bytes_up=Bytes(0),
            bytes_down=Bytes(0),
        )
        for number, metric in enumerate((0.5, 0.96, 0.98, 0.99), 1)
    )
    report = RunReport(
        world="a",
        seed=1,
        backend="tunnel",
        phase="finished",
        reason="",
        rounds=(),
        metric=0.99,
        verdict=ALWAYS_VALID,
        target=0.97,
        evaluations=points,
    )
    assert first_evaluation_s(report, "ours") == 3.0
    with pytest.raises(NotReachedError):
        first_evaluation_s(replace(report, evaluations=points[:2]), "ours")


def test_each_node_fails_every_ten_minutes_and_never_while_it_is_down() -> None:
    world = read_world_file(GRADES / "c.toml")
    until_ms = Milliseconds(100 * 3_600_000)
    faults = list(crashes(world, 60.0, until_ms))
    assert len(faults) == pytest.approx(8 * 600, rel=0.05)
    for node in world.nodes:
        own_faults = [fault for fault in faults if fault.nodes == node.name]
        ends_ms = [fault.at_ms + (fault.lasts_ms or 0) for fault in own_faults]
        assert all(
            end_ms <= fault.at_ms for end_ms, fault in zip(ends_ms, own_faults[1:], strict=False)
        )
