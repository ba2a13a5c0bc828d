"""What is refused before any link is opened for a world's job."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from hypergpu.jobfile import parse_job
from netsim.error import NetsimError
from netsim.network.world import WorldDescription
from netsim.network.world_file import parse_world
from netsim.run.preparation import (
    held_folder,
    require_free_folder,
    require_worker,
    required_job,
)

HAS_TORCH = find_spec("torch") is not None
NODE = '[[nodes]]\nprofile = "lan"\n'


def world(nodes: int) -> WorldDescription:
    job = f'[job]\nworkload = "null"\n[job.training]\nnodes = {nodes}\n'
    return parse_world(job + NODE, source="test", name="home")


def refusal(workload: str, worker: str) -> str:
    spec = parse_job(f'workload = "{workload}"', source="test")
    try:
        require_worker(spec, worker)
    except NetsimError as refused:
        return str(refused)
    return ""


def test_a_world_without_a_job_is_refused() -> None:
    with pytest.raises(NetsimError, match="the world home has no job"):
        required_job(parse_world(NODE, source="test", name="home"))


def test_a_job_that_waits_for_more_nodes_than_there_are_is_refused() -> None:
    assert required_job(world(1)).training.nodes == 1
    with pytest.raises(NetsimError, match="wants 2 nodes, and there is 1"):
        required_job(world(2))


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


def test_a_folder_of_an_earlier_run_is_emptied_of_what_it_left(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    with held_folder(folder):
        (folder / "logs").mkdir()
        (folder / "mine").touch()
    require_free_folder(folder)
    assert (folder / "logs").exists()
    with held_folder(folder):
        assert not (folder / "logs").exists()
        assert (folder / "mine").exists()


def test_a_folder_in_which_a_run_goes_on_is_refused_and_kept(tmp_path: Path) -> None:
    with held_folder(tmp_path):
        (tmp_path / "logs").mkdir()
        with pytest.raises(NetsimError, match="a run is going on in"):
            require_free_folder(tmp_path)
        with pytest.raises(NetsimError, match="a run is going on in"), held_folder(tmp_path):
            pass
        assert (tmp_path / "logs").exists()


def test_a_folder_with_somebody_elses_logs_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with pytest.raises(NetsimError, match="is not of a run"):
        require_free_folder(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["logs"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    with pytest.raises(NetsimError, match=r"nothing can be kept in .*"), held_folder(out):
        pass
