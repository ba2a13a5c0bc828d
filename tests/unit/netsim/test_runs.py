"""A world's job: what a command line chooses of it, and how it goes in virtual time."""

import random
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import msgspec
import pytest

from hypergpu.jobfile.reading import parse_job
from hypergpu.jobfile.toml import JobFileError
from hypergpu.units import Bytes, Microseconds, Milliseconds
from netsim.link import Link, LinkCourse, LinkDirection, NetsimError, Shape
from netsim.network.world import WorldDescription
from netsim.network.world_file import parse_world
from netsim.run.choices import (
    Choices,
    chosen_world,
    data_listing,
    require_worker,
    required_job,
    with_equal_work,
)
from netsim.run.job import run_virtually
from netsim.run.report import summary_lines
from netsim.virtual.node_link import CoordinatorLine, NodeLink, TransferWay
from netsim.virtual.sharing import Agenda

WORLD = """
seed = 3
job = "own.toml"
[[nodes]]
name = "van"
count = 2
profile = "lte-moving"
step_floor_ms = 40
churn = "c6"
[[faults]]
kind = "crash"
nodes = "van"
at = "1s"
"""
JOB = """
workload = "digits-softmax"
[training]
rounds = 10
inner_steps = 20
[evaluation]
every = 2
"""


@pytest.fixture
def world(tmp_path: Path) -> str:
    (tmp_path / "own.toml").write_text(JOB, "utf-8")
    path = tmp_path / "home.toml"
    path.write_text(WORLD, "utf-8")
    return str(path)


def test_nothing_chosen_leaves_everything_as_the_files_say(world: str) -> None:
    changed_world = chosen_world(Choices(world=world))
    assert (changed_world.seed, required_job(changed_world).training.rounds) == (3, 10)
    assert len(changed_world.faults) == 2


def test_a_seed_is_the_worlds_and_the_jobs(world: str) -> None:
    changed_world = chosen_world(Choices(world=world, seed=9))
    assert (changed_world.seed, required_job(changed_world).training.seed) == (9, 9)


def test_rounds_target_and_job_take_the_place_of_the_files(world: str, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(JOB.replace("softmax", "mlp"), "utf-8")
    changed_job = required_job(
        chosen_world(Choices(world=world, job=str(other), rounds=4, target=0.9)),
    )
    assert (changed_job.workload, changed_job.training.rounds, changed_job.evaluation.target) == (
        "digits-mlp",
        4,
        0.9,
    )


def test_sync_does_the_same_work_in_more_rounds() -> None:
    spec = with_equal_work(parse_job(JOB), "sync")
    assert (spec.training.rounds, spec.training.inner_steps, spec.evaluation.every) == (200, 1, 40)
    assert (spec.codec.up, spec.outer.momentum) == ("fp32", 0.0)


@pytest.mark.parametrize("strategy", ["fedavg", "diloco", "aware"])
def test_other_strategies_keep_the_rounds(strategy: str) -> None:
    spec = with_equal_work(parse_job(JOB), strategy)
    assert (spec.strategy, spec.training.rounds, spec.training.inner_steps) == (strategy, 10, 20)


def test_a_strategy_that_is_none_is_answered_with_what_was_meant(world: str) -> None:
    with pytest.raises(NetsimError, match=r'no strategy "diloko".*did you mean "diloco"'):
        chosen_world(Choices(world=world, strategy="diloko"))
    with pytest.raises(NetsimError, match="choose one of sync, fedavg, diloco"):
        chosen_world(Choices(world=world, strategy="x"))


def test_a_choice_that_no_job_can_have_is_named(world: str) -> None:
    with pytest.raises(NetsimError, match=r"--target 2.*never above 1"):
        chosen_world(Choices(world=world, target=2))


def test_a_lan_has_the_same_nodes_and_nothing_goes_wrong(world: str) -> None:
    near_world = chosen_world(Choices(world=world, is_near=True))
    assert [node.name for node in near_world.nodes] == ["van-1", "van-2"]
    assert {node.profile for node in near_world.nodes} == {"lan"}
    assert all(not node.shape.varies and node.churn is None for node in near_world.nodes)
    assert all(node.step_floor_ms == 0 for node in near_world.nodes)
    assert near_world.faults == ()


def test_data_lies_beside_the_job_that_names_it(tmp_path: Path, world: str) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("12345", "utf-8")
    text = 'workload = "text-gpt"\n[data]\npath = "texts"\n'
    (tmp_path / "gpt.toml").write_text(text, "utf-8")
    choices = Choices(world=world, job=str(tmp_path / "gpt.toml"))
    assert data_listing(required_job(chosen_world(choices)), choices.beside) == (("a.txt", 5),)
    (tmp_path / "gpt.toml").write_text(text.replace("texts", "gone"), "utf-8")
    with pytest.raises(JobFileError, match="there is no folder"):
        chosen_world(choices)


HAS_TORCH = find_spec("torch") is not None


def refusal(workload: str, worker: str) -> str:
    spec = parse_job(f'workload = "{workload}"', source="test")
    try:
        require_worker(spec, worker)
    except NetsimError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("workload", "worker"), [("null", "null"), ("null", "numpy"), ("digits-softmax", "numpy")]
)
def test_a_worker_that_can_train_the_job_is_taken(workload: str, worker: str) -> None:
    assert refusal(workload, worker) == ""


def test_the_worker_that_is_installed_is_taken_for_what_it_trains() -> None:
    assert refusal("digits-softmax", "auto") == ""
    assert (refusal("digits-cnn", "auto") == "") == HAS_TORCH


@pytest.mark.parametrize(
    ("workload", "worker", "fix"),
    [
        ("digits-softmax", "null", "--worker numpy"),
        ("digits-cnn", "numpy", "--worker torch"),
        ("digits-cnn", "null", "--worker torch"),
        ("null", "tensorflow", "auto, torch, numpy, null"),
    ],
)
def test_a_worker_that_cannot_is_refused_with_one_that_can(
    workload: str, worker: str, fix: str
) -> None:
    assert worker in refusal(workload, worker)
    assert fix in refusal(workload, worker)


def virtual_world(nodes: int) -> WorldDescription:
    job = f'[job]\nworkload = "null"\n[job.training]\nrounds = 2\nnodes = {nodes}\n'
    return parse_world(job + '[[nodes]]\nprofile = "lan"\n', source="test", name="home")


def test_a_job_that_finished_is_told_with_its_own_phase() -> None:
    report = run_virtually(virtual_world(1))
    assert report.phase == "finished"
    assert report.is_good
    assert not msgspec.structs.replace(report, phase="stopped").is_good


def test_virtual_time_says_that_it_has_no_metric() -> None:
    report = run_virtually(virtual_world(1))
    assert (report.metric, report.to_target, report.evaluations) == (None, None, ())
    assert "no metric" in report.note
    durations_ms = [each.duration_ms for each in report.rounds]
    assert [each.ended_ms for each in report.rounds] == [*accumulate(durations_ms)]
    assert f"note       {report.note}" in summary_lines(report)


def test_virtual_time_tells_what_it_counts_and_nothing_else() -> None:
    first = run_virtually(virtual_world(1)).rounds[0]
    assert (first.participants, first.updates, first.codecs) == (1, 1, {"topk256": 1})
    assert first.samples > 0
    assert first.bytes_up > 0
    assert (first.bytes_down, first.loss) == (None, None)


def test_virtual_time_trains_to_the_end_whatever_the_target() -> None:
    job = '[job]\nworkload = "digits-softmax"\nstrategy = "diloco"\n[job.training]\nrounds = 9\n'
    text = f'{job}[job.evaluation]\nevery = 1\ntarget = 0.7\n[[nodes]]\nprofile = "lan"\n'
    report = run_virtually(parse_world(text, source="test", name="home"))
    assert (len(report.rounds), report.target) == (9, 0.7)
    assert "target" not in report.reason


FAST = LinkDirection(delay_us=Microseconds(10_000), bits_per_s=100_000_000)
LINK = Link(up=FAST, down=FAST)


def test_a_cut_at_the_end_of_a_transfer_tells_of_it_once() -> None:
    agenda = Agenda()
    course = LinkCourse(Shape(link=LINK), key="1/link/a")
    link = NodeLink(agenda, course, random.Random(1), CoordinatorLine(agenda, LINK))
    deliver: list[str] = []

    def first(_took_ms: int) -> None:
        deliver.append("first")
        link.cut()

    link.move(TransferWay.UP, Bytes(1000), first, wait_ms=0)
    link.move(TransferWay.UP, Bytes(1000), lambda _took_ms: deliver.append("second"), wait_ms=0)
    agenda.run(lambda: False, Milliseconds(3_600_000))
    assert deliver == ["first", "second"]


def test_a_cut_ends_a_transfer_at_once() -> None:
    agenda = Agenda()
    course = LinkCourse(Shape(link=LINK), key="1/link/a")
    link = NodeLink(agenda, course, random.Random(1), CoordinatorLine(agenda, LINK))
    took: list[int] = []
    link.move(TransferWay.UP, Bytes(100_000_000), took.append, wait_ms=0)
    agenda.after(50, link.cut)
    agenda.run(lambda: False, Milliseconds(3_600_000))
    assert took == [50]


def bad_link() -> NodeLink:
    agenda = Agenda()
    lossy = LinkDirection(
        delay_us=Microseconds(50_000), bits_per_s=100_000_000, loss=0.02, burst_packets=4.0
    )
    course = LinkCourse(Shape(link=Link(up=lossy, down=FAST)), key="1/link/a")
    return NodeLink(agenda, course, random.Random(1), CoordinatorLine(agenda, LINK))


def test_probe_trains_lose_what_the_link_loses_in_bursts_as_long() -> None:
    link, dice = bad_link(), random.Random(2)
    trains = [link.train(dice, 200) for _ in range(500)]
    lost_packets, bursts = (sum(column) for column in zip(*trains, strict=True))
    assert 0.016 < lost_packets / 100_000 < 0.024
    assert 3.5 < lost_packets / bursts < 4.5


def test_a_probe_takes_a_round_trip() -> None:
    assert bad_link().round_trip_us(random.Random(2)) == 80_000  # the coordinator is 10 ms away


def test_several_connections_carry_more_over_a_line_that_loses() -> None:
    size = Bytes(4_000_000)
    one, eight = (bad_link().transfer_ms(TransferWay.UP, size, lines) for lines in (1, 8))
    assert eight < one / 3


def test_several_connections_carry_no_more_than_the_line_does() -> None:
    agenda = Agenda()
    course = LinkCourse(Shape(link=LINK), key="1/link/a")
    link = NodeLink(agenda, course, random.Random(1), CoordinatorLine(agenda, LINK))
    assert link.transfer_ms(TransferWay.UP, Bytes(25_000_000), 8) >= 2_000
