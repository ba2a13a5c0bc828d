"""Described worlds in virtual time: faults, invariants, and lines that are shared."""

import os
import subprocess
import sys
from functools import partial
from statistics import mean, median

import pytest
from msgspec.structs import replace

from hypergpu.ids import JobId, NodeId
from hypergpu.jobfile.spec import JobSpec, RoundRule, TrainingSettings
from hypergpu.units import Bytes, Microseconds, Milliseconds
from netsim.link import COORDINATOR_LINK, Link, LinkDirection, RateShape, Shape, Variation
from netsim.network.profiles import profile
from netsim.network.world import (
    Churn,
    ClockJumpFault,
    CorruptFault,
    CrashFault,
    FlapFault,
    LieFault,
    NodeDescription,
    PartitionFault,
    SlowDeviceFault,
    SlowDiskFault,
    SpanDistribution,
    SpanKind,
    WorldDescription,
    WorldFault,
)
from netsim.virtual.invariants import violations
from netsim.virtual.sharing import Agenda, SharedLink, SharedTransfer
from netsim.virtual.simulation import Simulation, WorldOutcome
from netsim.virtual.worlds import (
    DrawnFaults,
    SimulatedWorld,
    TransferSizes,
    calm_world,
    described_world,
    random_world,
)
from tests.unit.job_states import training

SECOND_US = 1_000_000
DAY_S = 86_400
JOB = JobId("job-0")
SPEC = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=8, inner_steps=10, batch_size=8, nodes=2),
    round=RoundRule(quorum=1.0),
)
NAMES = ("lan", "home-fibre", "home-cable", "home-dsl", "wifi-bad", "lte-moving")


def node(name: str, link: str = "home-fibre") -> NodeDescription:
    return NodeDescription(name=name, group=name, profile=link, shape=profile(link).shape)


TWO = WorldDescription(
    name="two", seed=5, job=SPEC, coordinator=COORDINATOR_LINK, nodes=(node("a"), node("b"))
)
OPEN = LinkDirection(delay_us=Microseconds(0), bits_per_s=0)
UNLIMITED = Link(up=OPEN, down=OPEN)
MIXED = replace(TWO, nodes=tuple(node(name, name) for name in NAMES))


def world(description: WorldDescription, model_bytes: int = 400_000) -> SimulatedWorld:
    sizes = TransferSizes(model=model_bytes, update=model_bytes // 4)
    return replace(described_world(description, sizes), limit_ms=Milliseconds(86_400_000))


def run_to_end(description: WorldDescription, model_bytes: int = 400_000) -> WorldOutcome:
    outcome = Simulation(world(description, model_bytes)).run()
    assert outcome.violations == ()
    return outcome


AT, LASTS = Milliseconds(2_000), Milliseconds(6_000)
CRASH = CrashFault(nodes="a", at_ms=AT, lasts_ms=LASTS)


def test_every_profile_finishes_a_job_and_tells_what_its_transfers_took() -> None:
    outcome = run_to_end(MIXED)
    assert len(outcome.round_ms[JOB]) == SPEC.training.rounds
    downloads = {
        name: median(outcome.transfers[NodeId(name)].downloads_ms) for name in ("lan", "home-dsl")
    }
    assert downloads["lan"] < 200 < downloads["home-dsl"]


def test_twenty_runs_of_a_world_with_everything_in_it_give_one_journal() -> None:
    spans = (
        SpanDistribution(kind=SpanKind.EXPONENTIAL, scale_s=scale_s) for scale_s in (20.0, 3.0)
    )
    churning_node = replace(MIXED.nodes[0], churn=Churn(*spans))
    faults = (
        replace(CRASH, nodes="lte-moving"),
        CorruptFault(nodes="home-dsl", at_ms=AT, lasts_ms=LASTS, percent=50.0),
    )
    full = replace(MIXED, nodes=(churning_node, *MIXED.nodes[1:]), faults=faults)
    outcomes = [run_to_end(full) for _ in range(20)]
    assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize("seed", [1, 12345])
def test_the_order_of_hashes_changes_nothing(seed: int) -> None:
    program = (
        "from netsim.virtual.simulation import Simulation\n"
        "from netsim.virtual.worlds import random_world\n"
        "print(sorted(Simulation(random_world(7)).run().journals.items()))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in (0, seed)
    ]
    assert outputs[0] == outputs[1]


def test_a_new_node_does_not_move_the_dice_of_others() -> None:
    more = replace(MIXED, nodes=(*MIXED.nodes, node("late", "lan")), coordinator=UNLIMITED)
    fewer = replace(MIXED, coordinator=UNLIMITED)
    first = [
        run_to_end(each).transfers[NodeId("wifi-bad")].downloads_ms[0] for each in (more, fewer)
    ]
    assert first[0] == first[1]


def test_a_slower_device_makes_longer_rounds() -> None:
    slow = replace(TWO, nodes=(replace(TWO.nodes[0], step_floor_ms=250.5), TWO.nodes[1]))
    extra_ms = mean(run_to_end(slow).round_ms[JOB]) - mean(run_to_end(TWO).round_ms[JOB])
    assert 2_000 < extra_ms < 2_600


def test_a_device_is_slow_for_as_long_as_the_script_says() -> None:
    slow = SlowDeviceFault(nodes="a", at_ms=AT, lasts_ms=LASTS, factor=10.0)
    struck_world, calm = run_to_end(replace(TWO, faults=(slow,))), run_to_end(TWO)
    assert max(struck_world.round_ms[JOB]) > 2 * max(calm.round_ms[JOB])
    assert struck_world.round_ms[JOB][-1] == pytest.approx(calm.round_ms[JOB][-1], rel=0.2)


def test_nobody_downloads_the_first_model_and_the_others_come_as_differences() -> None:
    as_differences = TransferSizes(model=100_000, update=100_000, whole=800_000)
    each_whole = TransferSizes(model=800_000, update=100_000)
    small, large = (
        Simulation(described_world(TWO, sizes)).run().transfers[NodeId("a")].downloads_ms
        for sizes in (as_differences, each_whole)
    )
    assert len(small) == len(large) == SPEC.training.rounds - 1
    assert all(whole > 1.3 * difference for whole, difference in zip(large, small, strict=True))


def test_a_second_transfer_goes_on_with_the_window_of_the_first() -> None:
    far = node("far")
    direction = replace(OPEN, delay_us=Microseconds(100_000))
    far = replace(far, shape=Shape(link=Link(up=direction, down=direction)))
    spec = replace(SPEC, training=replace(SPEC.training, nodes=1))
    outcome = run_to_end(replace(TWO, job=spec, nodes=(far,), coordinator=UNLIMITED))
    first, second, *_ = outcome.transfers[NodeId("far")].downloads_ms
    assert second <= first - 200


def test_the_coordinators_own_line_is_shared() -> None:
    narrow = replace(COORDINATOR_LINK.down, bits_per_s=2_000_000)
    shared_world = replace(TWO, coordinator=replace(COORDINATOR_LINK, up=narrow, down=narrow))
    # Two models of 400 kB over 2 Mbit/s take 3.3 s, two updates 0.8 s.
    assert (
        mean(run_to_end(shared_world).round_ms[JOB]) > 4_000 > mean(run_to_end(TWO).round_ms[JOB])
    )


def test_the_delay_of_the_coordinators_line_is_on_everybodys_way() -> None:
    far = replace(COORDINATOR_LINK.up, delay_us=Microseconds(200_000))
    distant = replace(TWO, coordinator=replace(COORDINATOR_LINK, up=far, down=far))
    for name in ("a", "b"):
        near_ms, far_ms = (
            median(run_to_end(each).transfers[NodeId(name)].downloads_ms) for each in (TWO, distant)
        )
        assert far_ms > near_ms + 400


def test_a_rate_that_drops_makes_the_transfers_longer_while_it_lasts() -> None:
    halves = Variation(rate=RateShape(every_ms=Milliseconds(20_000), factors=(1.0, 0.02)))
    first = replace(TWO.nodes[0], shape=Shape(link=TWO.nodes[0].link, variation=halves))
    varying_world = replace(TWO, nodes=(first, TWO.nodes[1]))
    varying_world = replace(
        varying_world, job=replace(SPEC, training=replace(SPEC.training, rounds=20))
    )
    times_ms = run_to_end(varying_world, 4_000_000).transfers[NodeId("a")].downloads_ms
    assert max(times_ms) > 3 * min(times_ms)


@pytest.mark.parametrize(
    "trouble",
    [
        CRASH,
        PartitionFault(nodes="a", at_ms=AT, lasts_ms=LASTS),
        FlapFault(nodes="a", at_ms=AT, lasts_ms=LASTS, every_ms=AT),
        SlowDiskFault(nodes="a", at_ms=AT, lasts_ms=LASTS, mib_per_s=0.1),
    ],
    ids=lambda fault: str(fault.kind),
)
def test_a_fault_that_heals_delays_the_job_and_changes_no_model(trouble: WorldFault) -> None:
    struck_world = run_to_end(replace(TWO, faults=(trouble,)))
    calm = run_to_end(TWO)
    assert struck_world.virtual_ms > calm.virtual_ms
    assert struck_world.models == calm.models


@pytest.mark.parametrize("lasts_ms", [Milliseconds(30_000), Milliseconds(600_000)])
@pytest.mark.parametrize("every_ms", [None, Milliseconds(1_000)], ids=["whole", "flapping"])
def test_a_partition_costs_ten_seconds_more_than_it_lasts_at_most(
    lasts_ms: Milliseconds, every_ms: Milliseconds | None
) -> None:
    fault: WorldFault = PartitionFault(nodes="a", at_ms=AT, lasts_ms=lasts_ms)
    if every_ms is not None:
        fault = FlapFault(nodes="a", at_ms=AT, lasts_ms=lasts_ms, every_ms=every_ms)
    both = replace(TWO, job=replace(SPEC, round=RoundRule(quorum=1.0)))
    struck_world = run_to_end(replace(both, faults=(fault,)))
    assert struck_world.virtual_ms - run_to_end(both).virtual_ms <= lasts_ms + 10_000


def test_a_coordinator_that_crashes_by_the_script_goes_on_from_its_journal() -> None:
    struck_world = run_to_end(replace(TWO, faults=(replace(CRASH, nodes="coordinator"),)))
    assert struck_world.models == run_to_end(TWO).models
    assert max(struck_world.round_ms[JOB]) > 6_000


@pytest.mark.parametrize("by_s", [-DAY_S, -3_600, DAY_S])
@pytest.mark.parametrize("who", ["a", "coordinator"])
def test_a_clock_that_jumps_changes_nothing(who: str, by_s: int) -> None:
    jump = ClockJumpFault(nodes=who, at_ms=AT, by_s=by_s)
    assert run_to_end(replace(TWO, faults=(jump,))).journals == run_to_end(TWO).journals


def test_damaged_updates_are_refused_counted_and_sent_again() -> None:
    corrupt = CorruptFault(nodes="a", at_ms=AT, lasts_ms=LASTS)
    struck_world = run_to_end(replace(TWO, faults=(corrupt,)))
    assert struck_world.rejected[JOB] > 0
    assert struck_world.models == run_to_end(TWO).models


def test_a_lie_makes_another_model() -> None:
    lie = LieFault(nodes="a", at_ms=AT, lasts_ms=LASTS)
    struck_world = run_to_end(replace(TWO, faults=(lie,)))
    assert struck_world.models != run_to_end(TWO).models


def test_a_node_that_never_comes_back_is_done_without() -> None:
    lasting_crash = replace(CRASH, lasts_ms=None)
    assert run_to_end(replace(TWO, faults=(lasting_crash,))).rounds == SPEC.training.rounds


def test_churn_takes_nodes_away_and_brings_them_back() -> None:
    spans = (SpanDistribution(kind=SpanKind.EXPONENTIAL, scale_s=scale_s) for scale_s in (4.0, 2.0))
    churning_world = replace(TWO, nodes=(replace(TWO.nodes[0], churn=Churn(*spans)), TWO.nodes[1]))
    outcome = run_to_end(churning_world)
    assert outcome.journals != run_to_end(TWO).journals
    assert outcome.transfers[NodeId("a")].uploads_ms


SEEDED_SPEC = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=12, inner_steps=20, batch_size=8, nodes=4),
    round=RoundRule(quorum=1.0),
)
STEADY = SimulatedWorld(seed=3, nodes=4, jobs=(SEEDED_SPEC,))
OF_ALL = replace(STEADY, jobs=(replace(SEEDED_SPEC, round=RoundRule(quorum=1.0)),))
"""A job that needs every update waits for whoever is killed, however often that is."""


def run_seed_to_end(world: SimulatedWorld) -> WorldOutcome:
    outcome = Simulation(world).run()
    assert outcome.violations == ()
    return outcome


@pytest.mark.parametrize("seed", range(40))
def test_a_world_full_of_faults_ends_every_job_without_breaking_an_invariant(seed: int) -> None:
    run_seed_to_end(random_world(seed))


def test_the_same_seed_gives_the_same_journal() -> None:
    first, second = run_seed_to_end(random_world(11)), run_seed_to_end(random_world(11))
    assert first == second
    assert first.journals != run_seed_to_end(random_world(12)).journals


@pytest.mark.parametrize("seed", range(5))
def test_a_coordinator_killed_again_and_again_ends_with_the_same_model(seed: int) -> None:
    steady = replace(OF_ALL, seed=seed)
    undisturbed_run = run_seed_to_end(steady)
    faults = DrawnFaults(coordinator_crash_ms=2_000, away_ms=4_000)
    disturbed_run = run_seed_to_end(replace(steady, faults=faults))
    assert disturbed_run.journals != undisturbed_run.journals
    assert disturbed_run.models == undisturbed_run.models


@pytest.mark.parametrize("seed", range(5))
def test_nodes_killed_and_back_in_time_end_with_the_same_model(seed: int) -> None:
    steady = replace(OF_ALL, seed=seed)
    undisturbed_run = run_seed_to_end(steady)
    faults = DrawnFaults(node_crash_ms=10_000, link_cut_ms=10_000, away_ms=1_000)
    disturbed_run = run_seed_to_end(replace(steady, faults=faults))
    assert disturbed_run.virtual_ms != undisturbed_run.virtual_ms
    assert disturbed_run.models == undisturbed_run.models


def test_a_job_that_cannot_start_is_reported_with_its_reason() -> None:
    spec = replace(SEEDED_SPEC, training=replace(SEEDED_SPEC.training, nodes=9))
    world = replace(STEADY, jobs=(spec,), limit_ms=Milliseconds(60_000))
    (violation,) = Simulation(world).run().violations
    assert violation == "never finished: job-0 is waiting (0 of 9 nodes are here)"


def test_the_checker_sees_a_sample_that_was_dropped() -> None:
    job = training()
    (stream,) = job.streams
    broken_job = replace(job, streams=(replace(stream, cursor=stream.cursor + 1),))
    assert violations(broken_job) == ("17 samples assigned, 16 held, 0 accepted",)


def test_a_hundred_nodes_share_a_job() -> None:
    assert run_seed_to_end(calm_world(seed=1, nodes=100, rounds=3)).rounds == 3


MEGABYTE = Bytes(1_000_000)
WIRE_BITS = 8 * 1.037 * MEGABYTE


class Line:
    """A shared link, and when its transfers ended."""

    def __init__(self, bits_per_s: int) -> None:
        self.agenda = Agenda()
        self.shared = SharedLink(self.agenda, bits_per_s)
        self.ended_ms: dict[str, int] = {}

    def begin(self, name: str, own_ms: int, size_bytes: Bytes = MEGABYTE) -> SharedTransfer:
        move = SharedTransfer(lambda: self.ended_ms.update({name: self.agenda.now_ms}))
        self.shared.begin(move, size_bytes, Milliseconds(own_ms))
        return move

    def run(self) -> dict[str, int]:
        self.agenda.run(lambda: False, Milliseconds(10**9))
        return self.ended_ms


def test_transfers_that_fit_together_keep_their_own_times() -> None:
    line = Line(bits_per_s=100_000_000)
    line.begin("one", 500)
    line.begin("other", 1000)
    assert line.run() == {"one": 500, "other": 1000}


def test_transfers_that_do_not_fit_get_equal_shares() -> None:
    line = Line(bits_per_s=10_000_000)
    line.begin("one", 100)
    line.begin("other", 100)
    both_ms = 2 * WIRE_BITS / 10_000
    assert all(abs(at_ms - both_ms) <= 2 for at_ms in line.run().values())


def test_a_slow_path_is_not_slowed_by_fast_ones() -> None:
    line = Line(bits_per_s=10_000_000)
    line.begin("slow", 8_300)
    for number in range(4):
        line.begin(f"fast {number}", 100)
    ended_ms = line.run()
    assert ended_ms["slow"] <= 8_310
    fast_ms = max(at_ms for name, at_ms in ended_ms.items() if name != "slow")
    # Four of them share the nine tenths that the slow one leaves.
    assert abs(fast_ms - 4 * WIRE_BITS / 9_000) <= 20


def test_who_is_left_speeds_up_when_another_ends() -> None:
    line = Line(bits_per_s=10_000_000)
    line.begin("small", 10, Bytes(500_000))
    line.begin("large", 10)
    ended_ms = line.run()
    assert abs(ended_ms["small"] - WIRE_BITS / 10_000) <= 2
    assert abs(ended_ms["large"] - 1.5 * WIRE_BITS / 10_000) <= 2


def test_a_dropped_transfer_leaves_its_share_to_others_and_never_ends() -> None:
    line = Line(bits_per_s=10_000_000)
    dropped_transfer = line.begin("dropped", 100)
    line.begin("other", 100)
    line.agenda.after(400, lambda: line.shared.drop(dropped_transfer))
    (ended_ms,) = line.run().values()
    assert abs(ended_ms - (400 + WIRE_BITS / 10_000 - 200)) <= 2


def test_a_link_without_limit_slows_nobody() -> None:
    line = Line(bits_per_s=0)
    for number in range(10):
        line.begin(str(number), 7)
    assert set(line.run().values()) == {7}


def test_many_transfers_keep_the_line_full() -> None:
    line = Line(bits_per_s=100_000_000)

    def begin(number: int) -> None:
        line.begin(str(number), 50 + number)

    for number in range(300):
        line.agenda.at(number, partial(begin, number))
    ended_ms = line.run()
    assert len(ended_ms) == 300
    full_ms = 300 * WIRE_BITS / 100_000
    assert full_ms <= max(ended_ms.values()) <= 1.02 * full_ms
