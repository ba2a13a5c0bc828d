"""What is refused before links are opened for a world's job."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

from hypergpu.cluster.folder import RunFolder, require_own, run_folder
from hypergpu.errors import HyperGPUError
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import are, several
from hypergpu.workloads.registry import UnknownWorkloadError, find
from netsim.error import NetsimError
from netsim.network.world import WorldDescription

WORKERS = ("null", "numpy", "torch")
"""Each trains what those before it train."""
AUTO = "auto"


def required_job(world: WorldDescription) -> JobSpec:
    """A world's job.

    Raises:
        NetsimError: It has none, or one that would wait for more nodes for ever.
    """
    if world.job is None:
        raise NetsimError(f"the world {world.name} has no job", 'give it one: job = "JOB.toml"')
    wanted, there = world.job.training.nodes, len(world.nodes)
    if wanted > there:
        some = f"{several(wanted, 'node')}, and there {are(there)} {there}"
        what = f"the job of the world {world.name} wants {some}"
        raise NetsimError(what, "add [[nodes]], or lower nodes in [job.training]")
    return world.job


def require_worker(spec: JobSpec, worker: str) -> None:
    """Refuse a worker that cannot train a job: its nodes would never be taken for it.

    Raises:
        NetsimError: Names the worker that can.
    """
    if worker not in (AUTO, *WORKERS):
        fix = f"choose one of {', '.join((AUTO, *reversed(WORKERS)))}"
        raise NetsimError(f'there is no worker "{worker}"', fix)
    try:
        entry = find(spec.workload)
    except UnknownWorkloadError as unknown:
        raise NetsimError(str(unknown), "name one of them in the job's workload") from unknown
    has_torch = find_spec("torch") is not None
    kind = ("torch" if has_torch else "numpy") if worker == AUTO else worker
    if WORKERS.index(kind) < WORKERS.index(entry.kind):
        what = f"the {kind} worker cannot train {entry.name}, which needs {entry.kind}"
        fix = f"--worker {entry.kind}, or another workload in the world's job"
        raise NetsimError(what, fix)
    if kind == "torch" and not has_torch:
        fix = "pip install 'hypergpu[torch]', or --worker numpy where the workload allows it"
        raise NetsimError("torch is not installed", fix)


def require_free_folder(folder: Path) -> None:
    """Refuse, without touching anything, a folder that a run could not have for itself.

    Raises:
        NetsimError: It has things of these names that no run left, or a run goes on in it.
    """
    with _refused():
        require_own(_run_folder(folder))


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Make the folder of a run, empty of an earlier run's things, and hold it for the block.

    Raises:
        NetsimError: As above, or it cannot be written.
    """
    with ExitStack() as held:
        with _refused():
            held.enter_context(run_folder(_run_folder(folder)))
        yield


def _run_folder(folder: Path) -> RunFolder:
    return RunFolder(folder, ".netsim-run", ("state", "logs"))


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except HyperGPUError as error:
        raise NetsimError(error.detail, error.fix) from error
