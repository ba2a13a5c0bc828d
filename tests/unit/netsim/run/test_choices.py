"""What the command line says in place of a world's and a job's own."""

from pathlib import Path

import msgspec
import pytest

from hypergpu.jobfile import JobFileError, parse_job
from netsim.error import NetsimError
from netsim.link import Variation
from netsim.run.choices import Choices, by_strategy, chosen_world, data_listing
from netsim.run.preparation import required_job

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
    found = chosen_world(Choices(world=world))
    assert (found.seed, required_job(found).training.rounds) == (3, 10)
    assert len(found.faults) == 2


def test_a_seed_is_the_worlds_and_the_jobs(world: str) -> None:
    found = chosen_world(Choices(world=world, seed=9))
    assert (found.seed, required_job(found).training.seed) == (9, 9)


def test_rounds_target_and_job_take_the_place_of_the_files(world: str, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(JOB.replace("softmax", "mlp"), "utf-8")
    found = required_job(
        chosen_world(Choices(world=world, job=str(other), rounds=4, target=0.9)),
    )
    assert (found.workload, found.training.rounds, found.evaluation.target) == (
        "digits-mlp",
        4,
        0.9,
    )


def test_sync_does_the_same_work_in_more_rounds() -> None:
    spec = by_strategy(parse_job(JOB), "sync")
    assert (spec.training.rounds, spec.training.inner_steps, spec.evaluation.every) == (200, 1, 40)
    assert (spec.codec.up, spec.outer.momentum) == ("fp32", 0.0)


@pytest.mark.parametrize("strategy", ["fedavg", "diloco", "aware"])
def test_other_strategies_keep_the_rounds(strategy: str) -> None:
    spec = by_strategy(parse_job(JOB), strategy)
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
    found = chosen_world(Choices(world=world, is_near=True))
    assert [node.name for node in found.nodes] == ["van-1", "van-2"]
    assert {node.profile for node in found.nodes} == {"lan"}
    assert all(node.variation == Variation() and node.churn is None for node in found.nodes)
    assert all(node.step_floor_ms == 0 for node in found.nodes)
    assert found.faults == ()


def test_choices_travel_to_the_program_that_runs_them(world: str) -> None:
    choices = Choices(world=world, strategy="aware", seed=4, is_near=True)
    assert msgspec.json.decode(msgspec.json.encode(choices), type=Choices) == choices


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
