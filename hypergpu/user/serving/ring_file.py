"""Job files of trainings through a ring: the file of a fine-tuning with a table ``[stages]``."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile.reading import data_folder, parse_job_table
from hypergpu.jobfile.spec import Evaluation, JobSpec
from hypergpu.jobfile.toml import JobFileError, KeyLines, Problem
from hypergpu.rings.ring_training import RingTraining
from hypergpu.serving.serve_request import DTYPES
from hypergpu.user.farm.job_file import read_tables
from hypergpu.workloads.entry import OptionValue, complete_options
from hypergpu.workloads.registry import find

WORKLOAD = "hf-causal-lm"
_TABLE = "stages"
_PASSES_USUAL = 16
"""Micro-batches that a step is cut into where the file does not say."""
UNUSED = ("strategy", "codec", "round", "aware", "trust", "pay", "model")
"""Keys and tables of other jobs that rings have no use for."""
_OUTER = "outer"
"""The same of one ring: several are folded."""
_UNUSED_EVALUATION = ("every", "target", "target_mode")
"""The same of the table ``[evaluation]``: each round is evaluated, and none ends the job."""
_HELD_OUT_PART, _HELD_OUT_LEAST = 4, 16
"""Rows that are evaluated where the file states nothing: a fourth of a round's, which costs a
twelfth of it, or so many at least.
"""
_UNUSED_FIX = (
    "remove it: rings are the only participants of their rounds, each of which is evaluated, and"
    " [stages] has its own settings"
)


class StageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The table ``[stages]``."""

    count: int
    """Nodes that hold the base together."""
    codec: str = "int8o"
    """How activations travel: ``float32`` or ``int8o``."""
    gradient_codec: str = "int8o"
    """How gradients travel, as ``codec``."""
    any_line: bool = False
    """Whether it begins where lines are forecast to be too slow."""
    rings: int = 1
    """Rings of so many nodes each, which train rows of their own and are folded after each round.
    """
    trusted: tuple[str, ...] = ()
    """Labels that operators must have given a node: all of its nodes may read the rows."""


class RingJob(NamedTuple):
    """A training through a ring, as it is submitted."""

    name: str
    """Name that calls ask for once it is trained; empty: the base's."""
    data: Path
    """Folder of rows, with the base in it."""
    stages: StageSettings
    training: RingTraining
    options: Mapping[str, OptionValue]
    """Options of the workload, all of them."""
    requirements: tuple[str, ...]
    held_out_rows_most: int = 0
    """Rows that are held out and evaluated after each round, at most; 0: all."""
    priority: int = 0
    weight: int = 1

    @property
    def dtype(self) -> str:
        """Type that the base is held in."""
        return str(self.options["base_dtype"])


def read_ring_file(path: Path) -> RingJob | None:
    """The training through a ring that a file describes; None: it has no table ``[stages]``.

    Raises:
        JobFileError: It describes none that can be; all problems at once.
        HyperGPUError: FILE_UNUSABLE, it cannot be read.
    """
    tree = read_tables(path)
    if _TABLE not in tree:
        return None
    lines = KeyLines(str(path), path.read_text("utf-8"))
    rest = {key: each for key, each in tree.items() if key != _TABLE}
    spec = parse_job_table(rest, lines)
    return ring_job(spec, tree[_TABLE], path.parent, lines, stated=rest)


def ring_job(
    spec: JobSpec,
    stages: object,
    beside: Path,
    lines: KeyLines | None = None,
    *,
    stated: Mapping[str, object] | None = None,
) -> RingJob:
    """The training of a spec through a ring.

    Args:
        spec: Of a fine-tuning.
        stages: The table ``[stages]``.
        beside: Folder that paths begin at.
        lines: Of the file.
        stated: What the file states.

    Raises:
        JobFileError: There can be none such.
    """
    lines = lines or KeyLines("settings")
    try:
        settings = msgspec.convert(stages, StageSettings, strict=True)
    except msgspec.ValidationError as error:
        fix = "write count = 3 under [stages]: docs/stages.md"
        raise JobFileError([Problem(_TABLE, str(error), fix, lines.of(_TABLE))]) from error
    problems = [*_problems(spec, settings, stated or {}, lines)]
    if problems:
        raise JobFileError(problems)
    options = complete_options(find(WORKLOAD), spec.options)
    training = _training(spec, settings, options)
    for is_right, key, rule in training.faults():
        if not is_right:
            problems.append(Problem(key, f"it is not {rule}", f"give {rule}", lines.of(key)))
    if str(options["base_dtype"]) not in DTYPES:
        fix = f"give one of {', '.join(DTYPES)}"
        what = "layers of a ring are not held in four bits"
        problems.append(Problem("options.base_dtype", what, fix, lines.of("options.base_dtype")))
    if problems:
        raise JobFileError(problems)
    return RingJob(
        name=spec.name,
        data=data_folder(spec, beside),
        stages=settings,
        training=training,
        options=options,
        requirements=spec.nodes.labels,
        held_out_rows_most=_held_out_rows_most(spec, training, stated or {}),
        priority=spec.nodes.priority,
        weight=spec.nodes.weight,
    )


def _problems(
    spec: JobSpec, stages: StageSettings, stated: Mapping[str, object], lines: KeyLines
) -> Iterator[Problem]:
    def problem(key: str, what: str, fix: str) -> Problem:
        return Problem(key, what, fix, lines.of(key))

    if spec.workload != WORKLOAD:
        fix = f'write workload = "{WORKLOAD}", or remove [stages]'
        yield problem("workload", f"a ring trains no {spec.workload}", fix)
    for key in _unused_keys(spec, stated):
        yield problem(key, "it does nothing beside [stages]", _UNUSED_FIX)
    if _OUTER in stated and stages.rings == 1:
        fix = "remove it, or train by several rings: rings = 2 under [stages]"
        yield problem(_OUTER, "it does nothing where the training has one ring", fix)
    if spec.inner.optimizer != "adamw":
        fix = 'write optimizer = "adamw"'
        yield problem("inner.optimizer", "stages of a ring step by AdamW", fix)
    if spec.data.source != "shared" or not spec.data.path:
        fix = 'name the folder of rows and base: path, with source = "shared"'
        yield problem("data", "a ring trains on rows that its user sends", fix)


def _unused_keys(spec: JobSpec, stated: Mapping[str, object]) -> Iterator[str]:
    """Keys that the file states and a ring has no use for."""
    yield from (key for key in UNUSED if key in stated)
    for name in _UNUSED_EVALUATION:
        if getattr(spec.evaluation, name) != getattr(Evaluation(), name):
            yield f"evaluation.{name}"


def _held_out_rows_most(spec: JobSpec, training: RingTraining, stated: Mapping[str, object]) -> int:
    if "evaluation" in stated:
        return spec.evaluation.samples
    return max(_HELD_OUT_LEAST, training.inner_steps * training.batch_rows // _HELD_OUT_PART)


def _training(
    spec: JobSpec, stages: StageSettings, options: Mapping[str, OptionValue]
) -> RingTraining:
    rows, inner = spec.training.batch_size, spec.inner
    return RingTraining(
        rounds=spec.training.rounds,
        inner_steps=spec.training.inner_steps,
        batch_rows=rows,
        micro_rows=inner.micro_batch or max(1, rows // _PASSES_USUAL),
        seed=spec.training.seed,
        mode=str(options["mode"]),
        rank=int(options["rank"]),
        alpha=int(options["alpha"]),
        targets=str(options["targets"]),
        adapter_seed=int(options["adapter_seed"]),
        learning_rate=inner.learning_rate,
        schedule=inner.schedule,
        warmup_steps=inner.warmup_steps,
        weight_decay=inner.weight_decay,
        beta1=inner.beta1,
        beta2=inner.beta2,
        epsilon=inner.epsilon,
        clip_norm=inner.clip_norm,
        gradient_codec=stages.gradient_codec,
        any_line=stages.any_line,
        rings=stages.rings,
        outer_learning_rate=spec.outer.learning_rate,
        outer_momentum=spec.outer.momentum,
    )


def check_data(job: RingJob) -> None:
    """Require the folder of rows.

    Raises:
        HyperGPUError: FILE_UNUSABLE, there is none.
    """
    if not job.data.is_dir():
        fix = "correct data.path; a relative one begins at the job file's folder"
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"there is no folder {job.data}", fix=fix)
