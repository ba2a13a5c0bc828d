"""Codecs, connections and deadline that a job states: its plans keep them, and plan the rest."""

import pytest
from msgspec.structs import replace

from coordinator.core.training.plan.decision import RoundPlan
from hypergpu.jobfile.spec import CODECS, SPARSE_CODECS, Aware, CodecChoice, JobSpec
from tests.unit.plan.fleet import BITS, PlayedFleet, Truth, names, spec

SLOW_LINE = Truth(up_mbit_s=1.0, down_mbit_s=2.0, loss=0.01)
TRUTHS = dict(zip(names(3), (Truth(), Truth(step_ms=100), SLOW_LINE), strict=True))
ROUNDS = 6


def stating(*keys: str, **choices: str) -> JobSpec:
    return replace(
        spec(nodes=3), codec=CodecChoice(**choices), aware=Aware(stated_keys=tuple(keys))
    )


def plans_of(job: JobSpec) -> list[RoundPlan]:
    """Plans of the rounds before anything is measured and after."""
    fleet = PlayedFleet(job, dict(TRUTHS))
    return [fleet.play().plan for _ in range(ROUNDS)]


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec in BITS])
def test_every_update_has_the_stated_codec(codec: str) -> None:
    for plan in plans_of(stating("codec.up", up=codec)):
        assert {part.codec for part in plan.nodes.values()} == {codec}
        assert plan.is_sparse is (codec in SPARSE_CODECS)


@pytest.mark.parametrize("codec", ["fp32", "topk64"])
def test_every_delta_has_the_stated_codec(codec: str) -> None:
    assert {plan.down for plan in plans_of(stating("codec.down", down=codec))} == {codec}


def test_every_node_has_the_stated_connections() -> None:
    job = stating("round.connections")
    job = replace(job, round=replace(job.round, connections=3))
    parts = [part for plan in plans_of(job) for part in plan.nodes.values()]
    assert {part.connections for part in parts} == {3}


def test_what_is_not_stated_is_planned() -> None:
    planned_rounds = plans_of(spec(nodes=3))
    ignored_spec = replace(spec(nodes=3), codec=CodecChoice("fp32", "fp32"))
    assert plans_of(ignored_spec) == planned_rounds
    assert {part.codec for plan in planned_rounds for part in plan.nodes.values()} != {"fp32"}


def test_a_stated_deadline_is_each_rounds_own_and_its_work_fits() -> None:
    job = spec(nodes=3)
    free = PlayedFleet(job, dict(TRUTHS))
    assert max(free.play().took_ms for _ in range(ROUNDS)) > 3_000
    job = replace(job, round=replace(job.round, deadline_ms=3_000))
    fleet = PlayedFleet(job, dict(TRUTHS))
    rounds = [fleet.play() for _ in range(ROUNDS)]
    assert {each.plan.deadline_ms for each in rounds} == {3_000}
    assert max(each.took_ms for each in rounds) <= 3_000
