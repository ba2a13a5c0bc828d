"""Simulates worlds by seeds, several at a time, and goes on where an earlier sweep was ended."""

import logging
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hypergpu.durable import write_durably
from hypergpu.engine.engine import Engine
from hypergpu.engine.opening import open_engine
from hypergpu.ids import Digest
from hypergpu.process import configure_logs
from hypergpu.units import several
from hypergpu.user.cluster.folder import RunFolder, require_own
from hypergpu.user.terminal.output import note, say, say_json
from netsim.link import NetsimError
from netsim.run.choices import Choices, chosen_world, required_job
from netsim.run.report import UNFINISHED_STATUS, RunReport
from netsim.run.world_task import inputs_of, simulate

_MARK, _REPORTS = ".netsim-sweep", "reports"
_HEADER = f"{'world':<24} {'finished':>11} {'median s':>13} {'least':>10} {'most':>10}"
_AT_ONCE = 256
"""Most worlds that an engine is asked for at a time: a thread of this process waits for each."""
_reports = msgspec.json.Decoder(RunReport)


class SweepOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The worlds and seeds to simulate."""

    choices: tuple[Choices, ...]
    """A world file each, without a seed."""
    seeds: tuple[int, ...]
    folder: Path
    """Gets a report for each world and seed; those of equal inputs are not simulated again."""
    engine: str
    """See `open_engine`."""
    processes: int
    """Processes of the engine ``local``; 0: one a core."""
    is_json: bool


class SweepCell(msgspec.Struct, frozen=True):
    """A world with a seed."""

    choices: Choices
    inputs: Digest
    """Digest of everything that decides its report."""
    report: Path


class SweepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated world."""

    world: str
    seed: int
    phase: str
    reason: str
    rounds: int
    round_ms: int
    """Median; 0: no round was done."""
    duration_ms: int
    """In virtual time, of all rounds."""
    journal: str


class SweepReport(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="hypergpu/netsim-sweep/1"
):
    """All worlds of a sweep, in the order of the command line."""

    rows: tuple[SweepRow, ...]
    reused: int
    """How many of them an earlier sweep had done."""

    @property
    def is_good(self) -> bool:
        """Whether every job finished."""
        return all(row.phase == "finished" for row in self.rows)


def run_sweep(order: SweepOrder) -> int:
    """Simulate what is not done yet, print the report and return the exit status.

    Raises:
        NetsimError: A world has no job, or a simulation ended without a report.
    """
    cells = sweep_cells(order)
    require_own(RunFolder(order.folder, _MARK, (_REPORTS,)))
    (order.folder / _REPORTS).mkdir(parents=True, exist_ok=True)
    (order.folder / _MARK).touch()
    due = [cell for cell in cells if stored_report(cell) is None]
    if reused_count := len(cells) - len(due):
        note(f"{reused_count} of {several(len(cells), 'world')} were done before")
    if due:
        _simulate(due, order)
    report = SweepReport(rows=tuple(map(_row, cells)), reused=reused_count)
    if order.is_json:
        say_json(report)
    else:
        for line in sweep_lines(report):
            say(line)
    return 0 if report.is_good else UNFINISHED_STATUS


def sweep_cells(order: SweepOrder) -> list[SweepCell]:
    """Return the worlds of a sweep, each with each seed.

    Raises:
        NetsimError: One has no job.
    """
    cells = []
    for each in order.choices:
        for seed in order.seeds:
            choices = replace(each, seed=seed)
            world = chosen_world(choices)
            required_job(world)
            inputs = inputs_of(world)
            cells.append(SweepCell(choices, inputs, order.folder / _REPORTS / f"{inputs}.json"))
    return cells


def stored_report(cell: SweepCell) -> RunReport | None:
    """Return the report that an earlier sweep left of the same inputs; None: there is none."""
    try:
        return _reports.decode(cell.report.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None


def sweep_lines(report: SweepReport) -> list[str]:
    """Return the report as lines for people, worlds with their spread over seeds."""
    lines = [_HEADER]
    for world, rows in groupby(report.rows, key=attrgetter("world")):
        each = list(rows)
        finished_rows = [row for row in each if row.phase == "finished"]
        spans_s = sorted(row.duration_ms / 1000 for row in finished_rows) or [0.0]
        lines.append(
            f"{world:<24} {len(finished_rows):>5} of {len(each):<5}"
            f" {statistics.median(spans_s):>10.1f} {spans_s[0]:>10.1f} {spans_s[-1]:>10.1f}"
        )
        lines += [
            f"  seed {row.seed}: {row.phase}: {row.reason}"
            for row in each
            if row not in finished_rows
        ]
    return lines


def _simulate(cells: Sequence[SweepCell], order: SweepOrder) -> None:
    configure_logs(logging.WARNING)
    engine = open_engine(order.engine, order.processes)
    with ThreadPoolExecutor(min(len(cells), _AT_ONCE), thread_name_prefix="sweep") as threads:
        cells_by_future = {threads.submit(_simulate_cell, engine, cell): cell for cell in cells}
        try:
            for number, future in enumerate(as_completed(cells_by_future), start=1):
                choices, phase = cells_by_future[future].choices, future.result().phase
                note(f"{number} of {len(cells)}: {choices.world}, seed {choices.seed}: {phase}")
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            engine.close()


def _simulate_cell(engine: Engine, cell: SweepCell) -> RunReport:
    """Have a world simulated, and keep the report."""
    report = simulate(engine, cell.choices, cell.inputs)
    write_durably(cell.report, msgspec.json.encode(report))
    return report


def _row(cell: SweepCell) -> SweepRow:
    report = stored_report(cell)
    if report is None:
        fix = "start the sweep again"
        raise NetsimError(f"{cell.report} was changed by somebody else", fix)
    spans_ms = [each.duration_ms for each in report.rounds]
    return SweepRow(
        world=report.world,
        seed=report.seed,
        phase=report.phase,
        reason=report.reason,
        rounds=len(spans_ms),
        round_ms=round(statistics.median(spans_ms)) if spans_ms else 0,
        duration_ms=sum(spans_ms),
        journal=report.journal,
    )
