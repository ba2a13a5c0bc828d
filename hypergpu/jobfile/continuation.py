"""Jobs that begin with weights: of a file, or of another job that they go on from."""

import re
from pathlib import Path

from msgspec.structs import replace

from hypergpu.jobfile.spec import JobSpec, ModelSettings
from hypergpu.jobfile.toml import JobFileError, Problem

_JOB_ID = re.compile(r"job-[0-9a-f]{12}")


def is_job_id(init: str) -> bool:
    """Whether ``init`` names a job rather than a file."""
    return _JOB_ID.fullmatch(init) is not None


def initial_weights(spec: JobSpec, beside: Path) -> Path:
    """Return the file of weights of a job file that lies in the folder ``beside``.

    Raises:
        JobFileError: There is no such file.
    """
    path = (beside / Path(spec.model.init).expanduser()).resolve()
    if not path.is_file():
        fix = "name a safetensors file, or a job by its whole id: hypergpu job ls --json"
        raise JobFileError([Problem("model.init", f"there is no file {path}", fix)])
    return path


def with_init(spec: JobSpec, init: str) -> JobSpec:
    """Return the job with other initial weights; a path is taken from the current folder.

    Args:
        spec: From a job file.
        init: A file, or a job's id; empty: as the job file says.
    """
    if not init:
        return spec
    absolute_init = init if is_job_id(init) else str(Path(init).absolute())
    return replace(spec, model=ModelSettings(init=absolute_init))


def continuing(spec: JobSpec, job_id: str, rounds: int) -> JobSpec:
    """Return the settings of a job that goes on from ``job_id``, whose settings are ``spec``.

    Its seed is another, so that samples come in another order; warm-up and target are none.
    """
    return replace(
        spec,
        training=replace(spec.training, rounds=rounds, seed=spec.training.seed ^ 1),
        model=ModelSettings(init=job_id),
        inner=replace(spec.inner, warmup_steps=0),
        evaluation=replace(spec.evaluation, target=0.0),
    )
