"""`hypergpu-node` as one file, built and run on a home that knows nothing of the clone."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from hypergpu.user.cluster.processes import kill_group, start
from tests.processes import CoordinatorProcess

ROOT = Path(__file__).parents[2]
JOB = """
workload = "digits-cnn"
[training]
rounds = 2
inner_steps = 10
nodes = 1
[options]
channels = 8
"""


@pytest.fixture(scope="session")
def node_pex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("pex") / "hypergpu-node.pex"
    subprocess.run([sys.executable, str(ROOT / ".ci" / "node_pex.py"), str(target)], check=True)
    return target


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    process = CoordinatorProcess(tmp_path / "cluster", is_plaintext=False)
    process.start()
    yield process
    process.end()


@contextmanager
def node(
    node_pex: Path, home: Path, token: str, *words: str, settings: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """The file as a node's daemon; gives its log."""
    log = home / "node.log"
    variables = {"HOME": str(home), "OMP_NUM_THREADS": "1", **(settings or {})}
    command = [str(node_pex), "join", "--token-file", "-", *words]
    daemon = start(command, secret=token, log=log, environment=variables)
    try:
        yield log
    finally:
        kill_group(daemon)


def train(coordinator: CoordinatorProcess, folder: Path) -> str:
    """Train a network to its end; gives the job's phase."""
    job = folder / "job.toml"
    job.write_text(JOB, "utf-8")
    with coordinator.client() as client:
        job_id = client.submit(job)
        for _ in client.watch(job_id):
            pass
        return client.job(job_id).job.phase


def python_with_torch(folder: Path) -> Path:
    """An environment without HyperGPU that finds the clone's torch, which takes gigabytes."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    torch = find_spec("torch")
    assert torch
    assert torch.origin
    (packages / "torch.pth").write_text(f"{Path(torch.origin).parents[1]}\n", encoding="utf-8")
    return folder / "bin" / "python"


def test_one_file_trains_a_network_with_the_python_that_it_is_given(
    node_pex: Path, coordinator: CoordinatorProcess, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    python = python_with_torch(tmp_path / "with torch")
    words = ("--worker-python", str(python))
    with node(node_pex, home, coordinator.node_token(), *words) as log:
        assert train(coordinator, tmp_path) == "finished", log.read_text("utf-8")
    assert str(ROOT) not in log.read_text("utf-8")


@pytest.mark.full
def test_one_file_makes_a_python_with_torch_for_its_worker(
    node_pex: Path, coordinator: CoordinatorProcess, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    with node(node_pex, home, coordinator.node_token(), settings=pip) as log:
        assert train(coordinator, tmp_path) == "finished", log.read_text("utf-8")
    assert (home / ".local/share/hypergpu/node.worker/bin/python").exists()
