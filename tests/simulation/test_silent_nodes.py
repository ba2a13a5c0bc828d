"""Jobs in virtual time among nodes that heartbeat and never work."""

from statistics import median

import pytest
from msgspec.structs import replace

from benchmarks.ours.silent_nodes import JOB, job_spec, run_world, silent_nodes_slowdown
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import STRATEGIES, RoundRule, Trust
from hypergpu.units import Milliseconds
from netsim.link import COORDINATOR_LINK, Shape
from netsim.network.world import NodeDescription, SilentFault, SlowDeviceFault, WorldDescription
from netsim.virtual.simulation import Simulation, WorldOutcome
from netsim.virtual.worlds import TransferSizes, described_world

HONEST = 4


def uploads_of_honest(outcome: WorldOutcome) -> list[int]:
    """Updates that each honest node has sent, fewest first."""
    return sorted(
        len(transfers.uploads_ms)
        for node, transfers in outcome.transfers.items()
        if "silent" not in node
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strategy", ["diloco", "aware"])
def test_a_third_of_silent_nodes_costs_a_job_of_fifty_rounds_a_tenth_at_most(
    strategy: str, seed: int
) -> None:
    assert silent_nodes_slowdown(seed, strategy=strategy) <= 1.1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_silent_node_of_five_stops_no_job_without_a_deadline(strategy: str) -> None:
    spec = job_spec(strategy, nodes=HONEST, rounds=30)
    with_silent = run_world(spec, 1, honest=HONEST, silent=1)
    without = run_world(spec, 1, honest=HONEST)
    assert with_silent.virtual_ms <= 1.25 * without.virtual_ms
    assert uploads_of_honest(with_silent)[0] >= 0.9 * with_silent.rounds


@pytest.mark.parametrize("deadline_ms", [0, 60_000])
def test_beside_sixty_silent_nodes_four_go_on_at_their_own_speed(deadline_ms: int) -> None:
    spec = job_spec("diloco", nodes=HONEST, rounds=30, deadline_ms=deadline_ms)
    with_silent = run_world(spec, 1, honest=HONEST, silent=60)
    without = run_world(spec, 1, honest=HONEST)
    usual_ms = median(without.round_ms[JOB])
    assert median(with_silent.round_ms[JOB][2:]) <= 1.1 * usual_ms
    assert max(with_silent.round_ms[JOB][2:]) <= 1.5 * usual_ms
    assert sum(with_silent.round_ms[JOB][:2]) <= 240_000
    assert uploads_of_honest(with_silent)[0] >= 25


@pytest.mark.parametrize("strategy", ["diloco", "aware"])
def test_nodes_that_fall_silent_later_cost_two_rounds_and_no_more(strategy: str) -> None:
    spec = job_spec(strategy, nodes=HONEST, rounds=30)
    struck_run = run_world(spec, 2, honest=HONEST, silent=2, from_ms=100_000)
    calm = run_world(spec, 2, honest=HONEST, silent=2, from_ms=10**9)
    usual_ms = median(calm.round_ms[JOB])
    long_rounds = [took_ms for took_ms in struck_run.round_ms[JOB] if took_ms > 2 * usual_ms]
    assert len(long_rounds) <= 3
    assert max(struck_run.round_ms[JOB][1:]) <= 4 * usual_ms


def near_world(
    *faults: SilentFault | SlowDeviceFault, strategy: str = "diloco", first_step_ms: int = 200
) -> WorldOutcome:
    """Four nodes next door, equal but for the first one's steps and faults; 30 rounds of 10 s."""
    names = [NodeId(f"node-{number}") for number in range(HONEST)]
    nodes = tuple(
        NodeDescription(
            name=name,
            group="near",
            shape=Shape(link=COORDINATOR_LINK),
            step_floor_ms=200 if number else first_step_ms,
        )
        for number, name in enumerate(names)
    )
    spec = job_spec(strategy, nodes=HONEST, rounds=30)
    world = WorldDescription(
        name="near", seed=1, job=spec, coordinator=COORDINATOR_LINK, nodes=nodes, faults=faults
    )
    outcome = Simulation(described_world(world, TransferSizes())).run()
    assert outcome.violations == ()
    return outcome


FROM, LASTS = Milliseconds(60_000), Milliseconds(40_000)


def test_a_node_that_is_silent_for_a_while_is_back_within_a_few_rounds() -> None:
    away = SilentFault(nodes="node-0", at_ms=FROM, lasts_ms=LASTS)
    outcome = near_world(away)
    missed_count = 30 - len(outcome.transfers[NodeId("node-0")].uploads_ms)
    assert missed_count <= 6


def test_an_honest_node_that_is_slow_for_a_while_loses_two_rounds_at_most() -> None:
    slow = SlowDeviceFault(nodes="node-0", at_ms=FROM, lasts_ms=LASTS, factor=6.0)
    outcome = near_world(slow)
    assert len(outcome.transfers[NodeId("node-0")].uploads_ms) >= 28


def test_a_node_three_times_slower_than_all_others_loses_its_first_three_rounds_at_most() -> None:
    outcome = near_world(strategy="aware", first_step_ms=600)
    assert len(outcome.transfers[NodeId("node-0")].uploads_ms) >= outcome.rounds - 3


def unequal_world(*step_ms: int, quorum: float = 0.6) -> WorldOutcome:
    """Nodes next door whose steps take so long; 40 rounds of fixed steps, of 10 s at 200 ms."""
    nodes = tuple(
        NodeDescription(
            name=NodeId(f"node-{number}"),
            group="near",
            shape=Shape(link=COORDINATOR_LINK),
            step_floor_ms=each,
        )
        for number, each in enumerate(step_ms)
    )
    spec = job_spec("diloco", nodes=2, rounds=40)
    # Pairs of nodes train the same samples, and fewer of them.
    spec = replace(spec, round=RoundRule(quorum=quorum), trust=Trust(duplicates="none"))
    world = WorldDescription(
        name="near", seed=1, job=spec, coordinator=COORDINATOR_LINK, nodes=nodes
    )
    outcome = Simulation(described_world(world, TransferSizes())).run()
    assert outcome.violations == ()
    return outcome


@pytest.mark.parametrize("times", [1, 1.1, 1.25, 1.4, 2, 3, 4, 8, 20, 64])
@pytest.mark.parametrize("others", [2, 3, 7])
def test_with_fixed_steps_a_slow_node_costs_no_more_time_than_its_samples_are_worth(
    times: float, others: int
) -> None:
    without = unequal_world(*[200] * others)
    beside = unequal_world(*[200] * others, int(200 * times))
    sample_times_ms = [each.virtual_ms / each.samples[JOB] for each in (beside, without)]
    assert sample_times_ms[0] <= 1.03 * sample_times_ms[1]


def test_with_a_quorum_of_one_each_round_waits_for_a_slow_node() -> None:
    beside = unequal_world(200, 200, 200, 800, quorum=1.0)
    assert beside.accepted[NodeId("node-3")] == beside.rounds - 1, "it joined in the first"
    assert beside.virtual_ms >= 3.9 * unequal_world(200, 200, 200).virtual_ms


def test_a_world_with_silent_nodes_gives_one_journal_each_time() -> None:
    spec = job_spec("diloco", nodes=HONEST, rounds=10)
    first, second = (run_world(spec, 3, honest=HONEST, silent=3) for _ in range(2))
    assert first == second
