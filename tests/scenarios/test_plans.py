"""What the planner says in scenes that people can judge. The transcripts are in
``tests/vectors/plans``; run this file as a module to write them anew, and read the difference.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.core.network.reading import NodeReading
from coordinator.core.network.work_forecast import RoundWork, finish_forecast
from coordinator.core.training.plan.decision import NodeResult, PlanMemory, PlanRequest, RoundPlan
from coordinator.core.training.plan.planning import plan_round
from hypergpu.ids import NodeId, Slot
from hypergpu.jobfile.spec import Aware, JobSpec
from hypergpu.units import Milliseconds, Samples
from tests.unit.plan.fleet import SIZES, Truth, overlapping, reading_of, spec, total_samples

BATCH = 32
FOLDER = Path(__file__).parents[1] / "vectors" / "plans"

Scene = Iterator[Mapping[str, Truth]]
"""Who is there in each round, and what is known of them."""

HOMES = {
    "fibre": Truth(50, 40, 200, 30),
    "cable": Truth(50, 20, 50, 40),
    "dsl": Truth(60, 6, 50, 50),
    "radio": Truth(100, 2, 20, 120, 0.01),
    "laptop": Truth(150, 10, 50, 40),
}
PLAIN = {name: Truth() for name in ("anna", "bert", "carl", "dora", "emil")}


def _five_home_lines() -> Scene:
    yield from [{}, HOMES, HOMES]


def _a_line_falls_tenfold_and_recovers() -> Scene:
    bad = {**PLAIN, "anna": replace(PLAIN["anna"], up_mbit_s=2, down_mbit_s=5)}
    yield from [PLAIN, PLAIN, bad, bad, PLAIN, PLAIN]


def _a_round_trip_triples() -> Scene:
    far = {**PLAIN, "anna": replace(PLAIN["anna"], rtt_ms=120)}
    yield from [PLAIN, PLAIN, far, far]


def _a_device_slows_threefold() -> Scene:
    slow = {**PLAIN, "anna": replace(PLAIN["anna"], step_ms=150)}
    yield from [PLAIN, PLAIN, slow, slow, PLAIN]


def _a_node_vanishes_and_is_back() -> Scene:
    without = {name: truth for name, truth in PLAIN.items() if name != "anna"}
    yield from [PLAIN, PLAIN, without, without, PLAIN]


def _speeds_of_ten_to_one() -> Scene:
    fleet = {f"speed{ms}": Truth(step_ms=ms) for ms in (20, 30, 50, 80, 100, 140, 170, 200)}
    yield from [fleet, fleet]


def _labels_are_skewed() -> Scene:
    yield from [HOMES, HOMES]


def _rounds_overlap() -> Scene:
    yield from [{}, HOMES, HOMES, HOMES]


def _every_step_is_exchanged() -> Scene:
    slow = {**PLAIN, "anna": replace(PLAIN["anna"], step_ms=150)}
    yield from [PLAIN, PLAIN, slow, slow, slow, slow, slow, PLAIN]


SCENES = {
    "five_home_lines": _five_home_lines,
    "a_line_falls_tenfold_and_recovers": _a_line_falls_tenfold_and_recovers,
    "a_round_trip_triples": _a_round_trip_triples,
    "a_device_slows_threefold": _a_device_slows_threefold,
    "a_node_vanishes_and_is_back": _a_node_vanishes_and_is_back,
    "speeds_of_ten_to_one": _speeds_of_ten_to_one,
    "labels_are_skewed": _labels_are_skewed,
    "every_step_is_exchanged": _every_step_is_exchanged,
    "rounds_overlap": _rounds_overlap,
}


def _job(name: str) -> JobSpec:
    if name == "every_step_is_exchanged":
        return spec(nodes=5, inner_steps=1, aware=Aware(inner_steps_max=1))
    if name == "rounds_overlap":
        return overlapping(spec(nodes=5))
    return spec(nodes=5, sharding="dirichlet" if name == "labels_are_skewed" else "iid")


def _results(
    plan: RoundPlan | None, readings: dict[NodeId, NodeReading]
) -> dict[NodeId, NodeResult]:
    """What became of a plan: each node took what is known of it by now."""
    if plan is None:
        return {}
    results = {}
    for node, part in plan.nodes.items():
        work = RoundWork(
            inner_steps=part.inner_steps * part.batch(BATCH) / BATCH,
            up_bytes=SIZES.update_bytes[part.codec],
            down_bytes=SIZES.update_bytes[plan.down],
            connections=part.connections,
        )
        finish = finish_forecast(readings.get(node, NodeReading()), work)
        took_ms = finish.mean_ms if finish is not None else part.forecast_ms
        results[node] = NodeResult(part, Milliseconds(max(1, took_ms)))
    return results


def transcript(name: str) -> str:
    """Plans of each round of the scene."""
    job, lines = _job(name), []
    previous: PlanMemory | None = None
    plan: RoundPlan | None = None
    prefetched_steps: dict[NodeId, int] = {}
    for number, fleet in enumerate(SCENES[name]()):
        there = fleet or HOMES
        readings = {NodeId(node): reading_of(truth) for node, truth in fleet.items()}
        request = PlanRequest(
            round=number,
            at_ms=Milliseconds(0),
            spec=job,
            candidates={NodeId(node): Slot(slot) for slot, node in enumerate(there)},
            samples_done=Samples(0),
            samples_total=total_samples(job),
            previous=previous,
            results=_results(plan, readings),
            prefetched=prefetched_steps,
        )
        plan = plan_round(request, readings, SIZES)
        lines.append(f"round {number}: {plan.reason}")
        lines += [f"  {node}: {part.reason}" for node, part in plan.nodes.items()]
        lines += [f"  {node} rests: {why}" for node, why in plan.resting.items()]
        previous = plan.memory
        prefetched_steps = {
            node: part.prefetch_steps for node, part in plan.nodes.items() if part.prefetch_steps
        }
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", SCENES)
def test_the_planner_says_what_its_transcript_says(name: str) -> None:
    assert transcript(name) == (FOLDER / f"{name}.txt").read_text("utf-8")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for scene in SCENES:
        (FOLDER / f"{scene}.txt").write_text(transcript(scene), "utf-8")
