"""`SweepRun`: the farm jobs of a sweep, one or a rung each, and the table that comes of them."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hypergpu.digests import digest_of
from hypergpu.durable import PRIVATE, write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.sweep_points import METRIC
from hypergpu.user.client import Coordinator
from hypergpu.user.farm.map_run import MapOutput, MapRun
from hypergpu.user.farm.output_folder import OutputFolder
from hypergpu.user.farm.output_rows import read_rows
from hypergpu.user.farm.pieces import RowContext, write_output, write_table
from hypergpu.user.farm.request import MapSettings
from hypergpu.user.farm.starting import start_map
from hypergpu.user.farm.sweep_parts import rung_order
from hypergpu.user.farm.sweep_plan import SweepPlan
from hypergpu.user.farm.sweep_rungs import Rung, rungs_of, survivors
from hypergpu.user.terminal.item_progress import ReportItems, item_progress
from hypergpu.workloads.metrics import RISES

_STATE = "sweep.json"
PointRow = dict[str, Any]


class SweepRequest(NamedTuple):
    """A sweep that is to be started, or gone on with."""

    plan: SweepPlan
    settings: MapSettings
    out: Path
    may_resume: bool = False
    may_overwrite: bool = False


class SweepRun:
    """A sweep. Calls block; the job that runs goes on whether anybody waits or not. Of a sweep with
    early stopping the next rung's job is created by whoever waits: `resume` goes on with it.

    >>> run = hypergpu.sweep("job.toml", grid={"inner.learning_rate": [1e-4, 3e-4]})
    >>> run.result().sort_values("metric")
    """

    def __init__(self, coordinator: Coordinator, order: SweepRequest) -> None:
        self._coordinator = coordinator
        self._order = order
        self._rungs = rungs_of(len(order.plan.points), order.plan.factor)
        self._rows: dict[int, PointRow] = {}
        """Newest rows by position, of rungs that are over."""
        self._positions: tuple[int, ...] = tuple(range(len(order.plan.points)))
        self._output: MapOutput | None = None
        self._next_rung = 0
        self._run: MapRun | None = self._begin()

    @property
    def id(self) -> str:
        """Id of the job that runs now, or ran last; empty: all of them ended before this run."""
        return self._run.id if self._run is not None else ""

    @property
    def job(self) -> MapRun | None:
        """The job that runs now, or ran last, to pause, resume or stop it."""
        return self._run

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """Rounds of the elimination; one without early stopping."""
        return self._rungs

    def wait(self, report: ReportItems = lambda _done, _total, _words: None) -> MapOutput:
        """Wait until all rungs are over and write the output.

        Args:
            report: Called with the rung's points that are done, those it has, and a few words.

        Raises:
            HyperGPUError: JOB_UNSUCCESSFUL, a job failed or was stopped, or no point of a rung has
                a metric.
        """
        while self._output is None:
            if self._run is None:
                self._output = self._write_output()
                break
            output = self._run.wait(report)
            if len(self._rungs) == 1:
                self._output = output
            else:
                self._take_rung(output.out)
                self._run = self._start_rung()
        return self._output

    def watch(self) -> MapOutput:
        """Show a bar until the output is written; interrupting it lets the job go on."""
        with item_progress(f"sweep {self.id}") as report:
            return self.wait(report)

    def result(self) -> Any:
        """Wait until the sweep is over; gives a DataFrame of pandas with a row a point, in order:
        a column for each key, ``metric``, ``metrics``, ``steps``, ``curve`` and what all outputs
        have.
        """
        try:
            import pandas as pd
        except ModuleNotFoundError as error:
            detail = f"a DataFrame needs pandas; the rows are in {self.wait().out}"
            raise HyperGPUError(Reason.MACHINE_UNFIT, detail, fix="pip install pandas") from error
        return pd.DataFrame(list(self.rows()))

    def rows(self) -> Iterator[PointRow]:
        """Wait until the sweep is over; gives the output's rows, with a field for each key."""
        keys = self._order.plan.keys
        for row, point in zip(read_rows(self.wait().out), self._order.plan.points, strict=True):
            values = {key: point.get(key) for key in keys}
            others = {name: value for name, value in row.items() if name != "point"}
            yield {"id": others.pop("id"), **values, **others}

    def best(self) -> PointRow:
        """Wait until the sweep is over; gives the row of the best point of those with most steps.

        Raises:
            HyperGPUError: JOB_UNSUCCESSFUL, no point has a metric.
        """
        rows = best_rows(list(self.rows()), self._order.plan.mode, 1)
        if not rows:
            raise _fruitless(len(self._order.plan.points))
        return dict(rows[0])

    def _begin(self) -> MapRun | None:
        order = self._order
        if len(self._rungs) == 1:
            whole = rung_order(order.plan, order.settings, self._positions, self._rungs[0], 1)
            whole = whole._replace(
                out=order.out, may_resume=order.may_resume, may_overwrite=order.may_overwrite
            )
            return start_map(self._coordinator, whole)
        self._begin_rungs()
        while self._next_rung < len(self._rungs) and (out := self._rung_out()).exists():
            self._take_rung(out)
        return self._start_rung()

    def _start_rung(self) -> MapRun | None:
        """Start the next rung, or go on with it; None: all are over."""
        if self._next_rung == len(self._rungs):
            return None
        plan, settings = self._order.plan, self._order.settings
        chosen_rung = self._rungs[self._next_rung]
        rung_job = rung_order(plan, settings, self._positions, chosen_rung, len(self._rungs))
        return start_map(
            self._coordinator, rung_job._replace(out=self._rung_out(), may_resume=True)
        )

    @property
    def _folder(self) -> Path:
        """Folder of the rungs' outputs, until the sweep is over."""
        return self._order.out.with_name(f"{self._order.out.name}.rungs")

    def _rung_out(self) -> Path:
        return self._folder / f"rung-{self._next_rung + 1}.jsonl"

    def _begin_rungs(self) -> None:
        """Take the folder of the rungs.

        Raises:
            HyperGPUError: FILE_PRESENT, something is there that may not be replaced.
        """
        order, folder = self._order, self._folder
        OutputFolder(order.out)  # Refuses a name that is no output's.
        if order.may_overwrite:
            shutil.rmtree(folder, ignore_errors=True)
        elif order.out.exists():
            detail = f"{order.out} is there already"
            fix = "choose another --out, or replace it: --force"
            raise HyperGPUError(Reason.FILE_PRESENT, detail, fix=fix)
        state = folder / _STATE
        digest = self._digest()
        if not state.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_durably(state, msgspec.json.encode(digest), mode=PRIVATE)
            return
        if not order.may_resume:
            detail, fix = f"{folder} holds an unfinished sweep", "--resume, or begin anew: --force"
            raise HyperGPUError(Reason.FILE_PRESENT, detail, fix=f"go on with it: {fix}")
        if state.read_bytes() != msgspec.json.encode(digest):
            detail = f"the unfinished sweep in {folder} had other points or other settings"
            fix = "give what it was given, or begin anew: --force"
            raise HyperGPUError(Reason.FILE_PRESENT, detail, fix=fix)

    def _digest(self) -> str:
        plan = self._order.plan
        content = [list(plan.points), list(plan.specs), plan.metric, plan.mode, plan.factor]
        return digest_of(msgspec.json.encode(content, order="sorted"))

    def _take_rung(self, out: Path) -> None:
        """Note the rows of a rung that is over, and who goes on.

        Raises:
            HyperGPUError: JOB_UNSUCCESSFUL, no point has a metric.
        """
        values: dict[int, float] = {}
        for position, row in zip(self._positions, read_rows(out), strict=True):
            self._rows[position] = {**row, "id": position}
            if row.get(METRIC) is not None:
                values[position] = row[METRIC]
        self._next_rung += 1
        if self._next_rung == len(self._rungs):
            return
        if not values:
            raise _fruitless(len(self._positions))
        plan = self._order.plan
        self._positions = survivors(values, plan.factor, plan.mode, self._positions)

    def _write_output(self) -> MapOutput:
        rows = [self._rows[position] for position in sorted(self._rows)]
        rules, context = self._order.settings.rules, RowContext([], {}, self._order.plan.seed)
        folder = OutputFolder(self._order.out)
        folder.begin(may_resume=False, may_overwrite=True)
        write_table(folder, rules, context, rows)
        errors = write_output(folder)
        folder.remove()
        shutil.rmtree(self._folder)
        return MapOutput(folder.out, len(rows), errors, folder.errors if errors else None)


def _fruitless(points: int) -> HyperGPUError:
    return HyperGPUError(
        Reason.JOB_UNSUCCESSFUL,
        f"none of the {points} points has a metric",
        fix="read why in the output's column error",
    )


def best_rows(rows: Sequence[Mapping[str, Any]], mode: str, count: int) -> list[Mapping[str, Any]]:
    """The best rows first; those with more steps come before others.

    Args:
        rows: Of a sweep.
        mode: Whether the metric falls or rises.
        count: How many at most.
    """
    sign = -1 if mode == RISES else 1
    measured_rows = [row for row in rows if row.get(METRIC) is not None]
    order = sorted(measured_rows, key=lambda row: (-row["steps"], sign * row[METRIC]))
    return order[:count]
