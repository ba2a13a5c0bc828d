"""`hypergpu.sweep`: one training for each point of a grid, on the nodes that are there."""

import atexit
import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.sweep_points import SWEEP_KIND
from hypergpu.jobfile.reading import data_folder
from hypergpu.jobfile.spec import JobSpec
from hypergpu.user.client import Coordinator
from hypergpu.user.farm.request import settings_of
from hypergpu.user.farm.sweep_grid import PointGrid
from hypergpu.user.farm.sweep_plan import job_of_file, sweep_plan
from hypergpu.user.farm.sweep_run import SweepRequest, SweepRun
from hypergpu.user.training.connecting import connect_until_exit
from hypergpu.user.training.train import (
    JobArguments,
    JobSamples,
    job_spec,
    translate_errors,
    write_job,
)

if TYPE_CHECKING:
    from hypergpu.workloads.networks.tracing import Loss, Module


class SweepArguments(TypedDict, total=False):
    """What `sweep` takes beside job and grid. All have defaults but a module's loss and data."""

    metric: str
    """Metric of held-out samples that points are compared by: ``loss``, or one that the workload
    measures.
    """
    mode: str
    """``min`` or ``max``; without it the metric's name decides."""
    stop_early: int
    """One in so many points goes on to the next rung of successive halving; 0: every point takes
    all its steps.
    """
    out: Path | str
    """File to write, which ends in ``.jsonl`` or ``.parquet``; without one the table is kept as
    long as the program runs.
    """
    resume: bool
    """Whether to go on with an unfinished sweep of the same output."""
    force: bool
    """Whether to replace an output, or an unfinished sweep."""
    coordinator: Coordinator
    """An open connection; else the one that environment, settings file or `hypergpu up` name."""
    loss: "Loss"
    """Only for a module: see `hypergpu.train`."""
    training: JobArguments
    """Only for a module: data and settings as `hypergpu.train` takes them."""
    name: str
    price: str
    budget: str
    checks: float
    nodes: int
    requirements: tuple[str, ...]
    priority: int
    weight: int


_OWN = frozenset(
    {
        *("metric", "mode", "stop_early", "out", "resume", "force", "coordinator"),
        *("loss", "training"),
    }
)


def sweep(
    job: "str | Path | JobSpec | Module", grid: PointGrid, **settings: Unpack[SweepArguments]
) -> SweepRun:
    """Train a job's model once for each point of a grid. It is `hypergpu.sweep`.

    Each point is a whole training by one node: rounds x inner_steps steps of the job file, without
    exchanges. Returns as soon as the points are there; `SweepRun.result` waits for the table.

    Args:
        job: A job file, settings, or a torch module with ``loss`` and ``training``.
        grid: Lists of values by key of a job file, of which every combination is a point, such as
            ``{"inner.learning_rate": [1e-4, 3e-4]}``; or a list of points.
        settings: See `SweepArguments`.

    Raises:
        HyperGPUError: Job, grid or data cannot be used, the output is there already, or the job is
            refused. The text says what to do.
    """
    given_settings = {name: value for name, value in settings.items() if name not in _OWN}
    map_settings = settings_of(SWEEP_KIND, given_settings)
    map_settings.check()
    with contextlib.ExitStack() as scratches:
        scratch = Path(scratches.enter_context(tempfile.TemporaryDirectory(prefix="hypergpu-")))
        spec, folder = _job_of(job, scratch / "data", settings)
        plan = sweep_plan(spec, grid, folder, settings)
        order = SweepRequest(
            plan,
            map_settings,
            Path(settings.get("out", scratch / "sweep.parquet")),
            settings.get("resume", False),
            settings.get("force", False),
        )
        run = SweepRun(settings.get("coordinator") or connect_until_exit(), order)
        # Later rungs send the data again where the coordinator has dropped them.
        atexit.register(scratches.pop_all().close)
        return run


def _job_of(job: Any, folder: Path, settings: SweepArguments) -> tuple[JobSpec, Path | None]:
    """The settings of a job, and the folder of its data."""
    if isinstance(job, str | Path):
        return job_of_file(Path(job))
    if isinstance(job, JobSpec):
        return job, data_folder(job, Path()) if job.data.path else None
    if "loss" not in settings or "training" not in settings:
        detail = f"a sweep of a {type(job).__name__} needs its loss and data"
        fix = "give loss= and training={'data': ...}, or name a job file"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    training = settings["training"]
    spec = job_spec(training)
    folder.mkdir()
    with translate_errors():
        samples = JobSamples.of(training, spec)
        write_job(folder, cast("Module", job), settings["loss"], samples, spec)
    return spec, folder
