"""The world and job that a command line chooses, and whether they can be run."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hypergpu.jobfile.limits import LIMITS
from hypergpu.jobfile.reading import check_data_folder, data_folder, read_job_file
from hypergpu.jobfile.rules import checked_spec, with_strategy
from hypergpu.jobfile.spec import STRATEGIES, JobSpec
from hypergpu.jobfile.toml import JobFileError, join_words, nearest
from hypergpu.units import are, several
from hypergpu.workloads.registry import UnknownWorkloadError, find
from netsim.link import UNLIMITED, NetsimError, Shape
from netsim.network.profiles import profile
from netsim.network.world import NodeDescription, WorldDescription
from netsim.network.world_file import read_world_file

NEAR = "lan"
"""The profile of a network that is out of the way."""


class Choices(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A world file and the values that replace its own. Empty and None: as the files say."""

    world: str
    job: str = ""
    """A job file in place of the world's job."""
    strategy: str = ""
    seed: int | None = None
    """Seeds the world and the job."""
    rounds: int | None = None
    target: float | None = None
    is_near: bool = False
    """No churn, no faults, no slow devices, and every node on a LAN."""

    @property
    def beside(self) -> Path:
        """Folder in which a relative ``data.path`` starts."""
        return Path(self.job or self.world).parent


class RunOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a world over links, as one program passes it to another."""

    choices: Choices
    folder: str
    """Gets state and logs."""
    worker: str
    give_up_after_s: float
    is_json: bool
    """Whether the report is printed as JSON, and nothing before it."""


def chosen_world(choices: Choices) -> WorldDescription:
    """Read the world and apply the choices.

    Raises:
        NetsimError: A file describes no world, or the choices fit no job.
        HyperGPUError: The job file cannot be read, or describes no job.
    """
    world = read_world_file(Path(choices.world))
    spec = world.job
    if choices.job:
        spec = read_job_file(Path(choices.job))
        check_data_folder(spec, Path(choices.job))
    if spec is not None:
        world = replace(world, job=_chosen_job(spec, choices))
    if choices.seed is not None:
        world = replace(world, seed=choices.seed)
    return _near(world) if choices.is_near else world


def data_listing(spec: JobSpec, beside: Path) -> tuple[tuple[str, int], ...]:
    """Return names and sizes of the files that a job uploads, which identify a data set."""
    if not spec.data.path:
        return ()
    folder = data_folder(spec, beside)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple((str(path.relative_to(folder)), path.stat().st_size) for path in files)


def _chosen_job(spec: JobSpec, choices: Choices) -> JobSpec:
    if choices.strategy:
        spec = with_equal_work(spec, choices.strategy)
    training, evaluation = spec.training, spec.evaluation
    if choices.seed is not None:
        training = replace(training, seed=choices.seed)
    if choices.rounds is not None:
        training = replace(training, rounds=choices.rounds)
    if choices.target is not None:
        evaluation = replace(evaluation, target=choices.target)
    changed_spec = replace(spec, training=training, evaluation=evaluation)
    try:
        return checked_spec(changed_spec)
    except JobFileError as wrong:
        problem = wrong.problems[0]
        options = "; ".join(_options(choices))
        raise NetsimError(f"{problem.key} with {options}: {problem.what}", problem.fix) from None


def _options(choices: Choices) -> Iterator[str]:
    for name in ("strategy", "seed", "rounds", "target"):
        value = getattr(choices, name)
        if value not in ("", None):
            yield f"--{name} {value}"


def with_equal_work(spec: JobSpec, strategy: str) -> JobSpec:
    """Return the same work by another strategy.

    Where rounds become shorter there are more of them, so that as many samples are trained on, and
    evaluations lie as many samples apart.

    Raises:
        NetsimError: There is no such strategy.
    """
    if strategy not in STRATEGIES:
        nearest_strategy = nearest(strategy, STRATEGIES)
        fix = (
            f'did you mean "{nearest_strategy}"?'
            if nearest_strategy
            else f"choose one of {join_words(STRATEGIES)}"
        )
        raise NetsimError(f'there is no strategy "{strategy}"', fix)
    changed_spec = with_strategy(spec, strategy)
    factor = max(1, spec.training.inner_steps // changed_spec.training.inner_steps)
    rounds = min(spec.training.rounds * factor, int(LIMITS["training.rounds"].most))
    every = min(spec.evaluation.every * factor, int(LIMITS["evaluation.every"].most))
    return replace(
        changed_spec,
        training=replace(changed_spec.training, rounds=rounds),
        evaluation=replace(changed_spec.evaluation, every=every),
    )


def _near(world: WorldDescription) -> WorldDescription:
    nodes = tuple(
        NodeDescription(
            name=node.name,
            group=node.group,
            profile=NEAR,
            shape=Shape(link=profile(NEAR).shape.link),
            memory_bytes=node.memory_bytes,
        )
        for node in world.nodes
    )
    return replace(world, nodes=nodes, faults=(), coordinator=UNLIMITED)


WORKERS = ("null", "numpy", "torch")
"""Each trains what those before it train."""
AUTO = "auto"


def required_job(world: WorldDescription) -> JobSpec:
    """Return a world's job.

    Raises:
        NetsimError: It has none, or one that would wait for more nodes forever.
    """
    if world.job is None:
        raise NetsimError(f"the world {world.name} has no job", 'give it one: job = "JOB.toml"')
    needed_nodes, there = world.job.training.nodes, len(world.nodes)
    if needed_nodes > there:
        some = f"{several(needed_nodes, 'node')}, and there {are(there)} {there}"
        what = f"the job of the world {world.name} wants {some}"
        raise NetsimError(what, "add [[nodes]], or lower nodes in [job.training]")
    return world.job


def require_worker(spec: JobSpec, worker: str) -> None:
    """Reject a worker that cannot train a job: its nodes would never be assigned to it.

    Raises:
        NetsimError: Names the worker that can.
    """
    if worker not in (AUTO, *WORKERS):
        fix = f"choose one of {', '.join((AUTO, *reversed(WORKERS)))}"
        raise NetsimError(f'there is no worker "{worker}"', fix)
    try:
        entry = find(spec.workload)
    except UnknownWorkloadError as error:
        raise NetsimError(str(error), "name one of them in the job's workload") from error
    has_torch = find_spec("torch") is not None
    kind = ("torch" if has_torch else "numpy") if worker == AUTO else worker
    if WORKERS.index(kind) < WORKERS.index(entry.kind):
        what = f"the {kind} worker cannot train {entry.name}, which needs {entry.kind}"
        fix = f"--worker {entry.kind}, or another workload in the world's job"
        raise NetsimError(what, fix)
    if kind == "torch" and not has_torch:
        fix = "pip install 'hypergpu[torch]', or --worker numpy where the workload allows it"
        raise NetsimError("torch is not installed", fix)
