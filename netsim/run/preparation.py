"""What is refused before links are opened for a world's job."""

import shutil
from importlib.util import find_spec
from pathlib import Path

from hypergpu.catalogue.registry import UnknownWorkloadError, find
from hypergpu.spec import JobSpec
from netsim.refusal import RefusedError
from netsim.worldfile import WorldDescription

WORKERS = ("null", "numpy", "torch")
"""Each trains what those before it train."""
AUTO = "auto"
_LEFT = ("state", "logs")
_MARK = ".netsim-run"


def required_job(world: WorldDescription) -> JobSpec:
    """A world's job.

    Raises:
        RefusedError: It has none, or one that would wait for more nodes for ever.
    """
    if world.job is None:
        raise RefusedError(f"the world {world.name} has no job", 'give it one: job = "JOB.toml"')
    wanted, there = world.job.training.nodes, len(world.nodes)
    if wanted > there:
        what = f"the job of the world {world.name} wants {wanted} nodes, and there are {there}"
        raise RefusedError(what, "add [[nodes]], or lower nodes in [job.training]")
    return world.job


def require_worker(spec: JobSpec, worker: str) -> None:
    """Refuse a worker that cannot train a job: its nodes would never be taken for it.

    Raises:
        RefusedError: Names the worker that can.
    """
    if worker not in (AUTO, *WORKERS):
        fix = f"choose one of {', '.join((AUTO, *reversed(WORKERS)))}"
        raise RefusedError(f'there is no worker "{worker}"', fix)
    try:
        entry = find(spec.workload)
    except UnknownWorkloadError as unknown:
        raise RefusedError(str(unknown), "name one of them in the job's workload") from unknown
    has_torch = find_spec("torch") is not None
    kind = ("torch" if has_torch else "numpy") if worker == AUTO else worker
    if WORKERS.index(kind) < WORKERS.index(entry.kind):
        what = f"the {kind} worker cannot train {entry.name}, which needs {entry.kind}"
        fix = f"--worker {entry.kind}, or another workload in the world's job"
        raise RefusedError(what, fix)
    if kind == "torch" and not has_torch:
        fix = "pip install 'hypergpu[torch]', or --worker numpy where the workload allows it"
        raise RefusedError("torch is not installed", fix)


def prepare_folder(folder: Path) -> None:
    """Make the folder of a run, empty of what an earlier run left in it.

    Raises:
        RefusedError: It cannot be written, or has things of these names that no run left.
    """
    mark = folder / _MARK
    fix = "choose a folder that you may write and that is a run's alone: --out FOLDER"
    try:
        taken = [name for name in _LEFT if (folder / name).exists()]
        if taken and not mark.exists():
            raise RefusedError(f"{folder / taken[0]} is there and is not of a run", fix)
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
        for name in taken:
            # Its coordinator would go on with that run's job.
            shutil.rmtree(folder / name)
    except OSError as error:
        raise RefusedError(f"nothing can be kept in {folder}: {error.strerror}", fix) from error
