"""What the command line says in place of what a world file and its job say."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hypergpu.jobfile import (
    LIMITS,
    JobFileError,
    check_data_folder,
    checked_spec,
    data_folder,
    read_job_file,
    with_strategy,
)
from hypergpu.jobfile.problem import join_words, nearest
from hypergpu.jobfile.spec import STRATEGIES, JobSpec
from netsim.error import NetsimError
from netsim.link import UNLIMITED, Variation
from netsim.network.profiles import profile
from netsim.network.world import NodeDescription, WorldDescription
from netsim.network.world_file import read_world_file

NEAR = "lan"
"""The profile of a network that is out of the way."""


class Choices(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A world file and what is to be otherwise than it says. Empty and None: as the files say."""

    world: str
    job: str = ""
    """A job file in place of the world's job."""
    strategy: str = ""
    seed: int | None = None
    """Of the world's dice and the job's."""
    rounds: int | None = None
    target: float | None = None
    is_near: bool = False
    """No churn, no faults, no slow devices, and every node on a LAN."""

    @property
    def beside(self) -> Path:
        """Where a relative ``data.path`` starts."""
        return Path(self.job or self.world).parent


def chosen_world(choices: Choices) -> WorldDescription:
    """The world with everything chosen in it.

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
    """Names and sizes of the files that a job uploads: what tells one data set from another."""
    if not spec.data.path:
        return ()
    folder = data_folder(spec, beside)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple((str(path.relative_to(folder)), path.stat().st_size) for path in files)


def _chosen_job(spec: JobSpec, choices: Choices) -> JobSpec:
    if choices.strategy:
        spec = by_strategy(spec, choices.strategy)
    training, evaluation = spec.training, spec.evaluation
    if choices.seed is not None:
        training = replace(training, seed=choices.seed)
    if choices.rounds is not None:
        training = replace(training, rounds=choices.rounds)
    if choices.target is not None:
        evaluation = replace(evaluation, target=choices.target)
    changed = replace(spec, training=training, evaluation=evaluation)
    try:
        return checked_spec(changed)
    except JobFileError as wrong:
        problem = wrong.problems[0]
        said = "; ".join(_said(choices))
        raise NetsimError(f"{problem.key} with {said}: {problem.what}", problem.fix) from None


def _said(choices: Choices) -> Iterator[str]:
    for name in ("strategy", "seed", "rounds", "target"):
        value = getattr(choices, name)
        if value not in ("", None):
            yield f"--{name} {value}"


def by_strategy(spec: JobSpec, strategy: str) -> JobSpec:
    """The same work by another strategy.

    Where rounds become shorter there are more of them, so that as many samples are trained on, and
    evaluations lie as many samples apart.

    Raises:
        NetsimError: There is no such strategy.
    """
    if strategy not in STRATEGIES:
        meant = nearest(strategy, STRATEGIES)
        fix = f'did you mean "{meant}"?' if meant else f"choose one of {join_words(STRATEGIES)}"
        raise NetsimError(f'there is no strategy "{strategy}"', fix)
    changed = with_strategy(spec, strategy)
    factor = max(1, spec.training.inner_steps // changed.training.inner_steps)
    rounds = min(spec.training.rounds * factor, int(LIMITS["training.rounds"].most))
    every = min(spec.evaluation.every * factor, int(LIMITS["evaluation.every"].most))
    return replace(
        changed,
        training=replace(changed.training, rounds=rounds),
        evaluation=replace(changed.evaluation, every=every),
    )


def _near(world: WorldDescription) -> WorldDescription:
    nodes = tuple(
        NodeDescription(
            name=node.name,
            group=node.group,
            profile=NEAR,
            link=profile(NEAR).link,
            variation=Variation(),
            memory_bytes=node.memory_bytes,
        )
        for node in world.nodes
    )
    return replace(world, nodes=nodes, faults=(), coordinator=UNLIMITED)
