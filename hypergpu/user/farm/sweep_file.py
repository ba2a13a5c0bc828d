"""Job files of sweeps: TOML with ``kind = "sweep"``, beside the job file that they vary."""

from pathlib import Path
from typing import Literal

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.map_request import ParameterValue
from hypergpu.farm.sweep_points import SWEEP_KIND
from hypergpu.user.farm.job_file import read_tables
from hypergpu.user.farm.request import settings_of
from hypergpu.user.farm.sweep_plan import job_of_file, sweep_plan
from hypergpu.user.farm.sweep_run import SweepRequest

_FIX = 'write kind = "sweep", job, out and a table [grid] or [[points]]: docs/farm.md'


class NodeChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the farm job that a sweep becomes."""

    name: str = ""
    price: str = ""
    budget: str = ""
    checks: float = 0.03
    nodes: int = 0
    requirements: tuple[str, ...] = ()
    priority: int = 0
    weight: int = 1


class SweepFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job file of a sweep."""

    kind: Literal["sweep"]
    job: str
    """Path of the job file whose keys vary, from the file's folder."""
    out: str
    """Path of the output, from the file's folder."""
    metric: str = "loss"
    mode: str = ""
    stop_early: int = 0
    grid: dict[str, list[ParameterValue]] = {}
    points: list[dict[str, ParameterValue]] = []
    map: NodeChoice = NodeChoice()


def read_sweep_file(path: Path) -> SweepRequest | None:
    """The sweep that a file describes; None: its kind is another.

    Raises:
        HyperGPUError: SPEC_INVALID, it describes none that can be; FILE_UNUSABLE; or what
            `hypergpu.sweep` raises of job and grid.
    """
    table = read_tables(path)
    if table.get("kind") != "sweep":
        return None
    try:
        file = msgspec.convert(table, SweepFile, strict=True)
    except msgspec.ValidationError as error:
        raise HyperGPUError(Reason.SPEC_INVALID, f"{path}: {error}", fix=_FIX) from error
    if bool(file.grid) is bool(file.points):
        detail = f"{path} has {'both' if file.grid else 'neither'} of [grid] and [[points]]"
        raise HyperGPUError(Reason.SPEC_INVALID, detail, fix="give one of the two")
    spec, folder = job_of_file(path.parent / file.job)
    choice = {"metric": file.metric, "mode": file.mode, "stop_early": file.stop_early}
    plan = sweep_plan(spec, file.grid or file.points, folder, choice)
    settings = settings_of(SWEEP_KIND, msgspec.structs.asdict(file.map))
    settings.check()
    return SweepRequest(plan, settings, path.parent / file.out)
