"""`MapRun`: a farm job that a script, notebook or command started, or goes on with."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.client import Coordinator, JobDetail
from hypergpu.user.client.asynchronous import AsyncCoordinator
from hypergpu.user.client.blocking import wait_for
from hypergpu.user.client.bundles import ResultsView, ResultView
from hypergpu.user.client.connection import RESTARTING
from hypergpu.user.farm.item_rules import ItemRules
from hypergpu.user.farm.output_folder import OutputFolder, PieceName
from hypergpu.user.farm.output_rows import read_frame, read_vectors
from hypergpu.user.farm.pieces import RowContext, write_dropped, write_output, write_piece
from hypergpu.user.terminal.item_progress import ReportItems, item_progress

_LOOK_EVERY_S = 0.5
_LOOK_EVERY_MOST_S = 5.0
_FETCHES_AT_ONCE = 8


class MapOutput(NamedTuple):
    """What a finished run left on disk."""

    out: Path
    items: int
    errors: int
    """Items that have a reason in place of a value, in the file of errors."""
    errors_file: Path | None
    """None: there are no errors."""


class MapDone(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/mapped/1"):
    """`map`: a finished run."""

    job: str
    out: str
    items: int
    errors: int
    errors_file: str | None


class MapRun:
    """A farm job. Calls block; the job goes on whether anybody waits or not.

    >>> run = hypergpu.map("embed", data="corpus.jsonl", base="models/minilm")
    >>> vectors = run.result()
    """

    def __init__(
        self,
        coordinator: Coordinator,
        job_id: str,
        folder: OutputFolder,
        rules: ItemRules,
        context: RowContext,
    ) -> None:
        self.id = job_id
        self._coordinator = coordinator
        self._folder = folder
        self._rules = rules
        self._context = context
        self._next_number = 0
        self._next_dropped = 0
        self._output: MapOutput | None = None

    def __repr__(self) -> str:
        bundles = self.detail().job.bundles
        done_text = f", {bundles.settled_items} of {bundles.items} items" if bundles else ""
        return f"<MapRun {self.id}: {self.detail().job.phase}{done_text}>"

    def detail(self) -> JobDetail:
        """The job at the moment."""
        return self._coordinator.job(self.id)

    def pause(self) -> None:
        """Stop the job's work now; what was accepted stays, and a resume goes on from it."""
        self._coordinator.pause(self.id)

    def resume(self) -> None:
        """Go on after a pause."""
        self._coordinator.resume(self.id)

    def raise_budget(self, budget: int) -> None:
        """Let the job cost more, in the smallest unit of money; one whose budget was spent goes on.

        Raises:
            HyperGPUError: The job has no price, or the budget is no more than before.
        """
        self._coordinator.raise_budget(self.id, budget)

    def stop(self) -> None:
        """End the job; its results so far can be fetched."""
        self._coordinator.stop(self.id)

    def watch(self) -> MapOutput:
        """Show a bar until the job has ended and its output is written; interrupting it lets the
        job go on.
        """
        with item_progress(f"{self._rules.name} {self.id}") as report:
            return self.wait(report)

    def wait(self, report: ReportItems = lambda _done, _total, _words: None) -> MapOutput:
        """Wait until the job has ended, fetching results as they come, and write the output.

        Args:
            report: Called with the items that are done, those there are, and a few words.

        Raises:
            HyperGPUError: JOB_UNSUCCESSFUL, it failed or was stopped; what came stays in the
                output's folder, readable.
        """
        if self._output is None:
            self._output = wait_for(self._wait(report))
        return self._output

    def fetch(self) -> ResultsView:
        """Fetch the results that are there by now, as pieces beside the output."""
        return wait_for(self._fetch())

    @property
    def pieces(self) -> list[Path]:
        """Files of the results that were fetched, in order of the input, while the job runs."""
        return [self._folder.piece_path(name) for name in self._folder.piece_names()]

    def result(self) -> Any:
        """Wait until the job has ended; gives ``float32[items, ...]`` where values are vectors,
        with NaN for items that have none, else a DataFrame of pandas.
        """
        output = self.wait()
        if "vector" in self._rules.columns.values():
            return read_vectors(output.out, next(iter(self._rules.columns)))
        return read_frame(output.out)

    async def _wait(self, report: ReportItems) -> MapOutput:
        pause_s = _LOOK_EVERY_S
        while True:
            try:
                view = await self._fetch()
            except HyperGPUError as error:
                if error.reason not in RESTARTING:
                    raise
            else:
                words = _words(self._next_dropped, self._folder)
                report(view.settled_items, view.items, words)
                if view.is_over:
                    return await self._finish(view)
            await asyncio.sleep(pause_s)
            pause_s = min(_LOOK_EVERY_MOST_S, pause_s * 1.1)

    @property
    def _calls(self) -> AsyncCoordinator:
        return self._coordinator.asynchronous

    async def _fetch(self) -> ResultsView:
        """Fetch what is new; gives the newest view, whose results are all fetched."""
        names = set(self._folder.piece_names())
        while True:
            view = await self._calls.results(
                self.id, self._next_number, from_dropped=self._next_dropped
            )
            new_results = [each for each in view.results if _name(each) not in names]
            for first in range(0, len(new_results), _FETCHES_AT_ONCE):
                some = new_results[first : first + _FETCHES_AT_ONCE]
                await asyncio.gather(*(self._fetch_piece(each) for each in some))
            await asyncio.to_thread(
                write_dropped, self._folder, self._rules, self._context, view.dropped_items
            )
            self._next_number += len(view.results)
            self._next_dropped += len(view.dropped_items)
            if not view.results and not view.dropped_items:
                return view

    async def _fetch_piece(self, result: ResultView) -> None:
        target = self._folder.path / f"result-{result.start}"
        await self._calls.fetch_result(self.id, result, target)
        await asyncio.to_thread(self._write_piece, result, target)

    def _write_piece(self, result: ResultView, target: Path) -> None:
        write_piece(self._folder, self._rules, self._context, result, target.read_bytes())
        target.unlink()

    async def _finish(self, view: ResultsView) -> MapOutput:
        if view.settled_items < view.items:
            job = (await self._calls.job(self.id)).job
            detail = (
                f"{self.id} {job.phase}: {job.reason or 'no reason is stated'};"
                f" {view.settled_items} of {view.items} items are done"
            )
            fix = f"their rows are in {self._folder.pieces}; begin anew: --force"
            raise HyperGPUError(Reason.JOB_UNSUCCESSFUL, detail, fix=fix)
        return await asyncio.to_thread(self._write_output, view)

    def _write_output(self, view: ResultsView) -> MapOutput:
        folder = self._folder
        folder.publish_pictures()
        errors = write_output(folder)
        folder.remove()
        return MapOutput(folder.out, view.items, errors, folder.errors if errors else None)


def _name(result: ResultView) -> PieceName:
    return PieceName(result.start, result.items)


def _words(dropped_count: int, folder: OutputFolder) -> str:
    return f"{dropped_count} given up" if dropped_count else f"into {folder.out.name}"


@contextlib.contextmanager
def leaving_job(run: MapRun, command: str) -> Iterator[None]:
    """Say how to come back where the block is interrupted: the job goes on.

    Args:
        run: Of the job.
        command: What goes on with it.
    """
    from hypergpu.user.terminal.output import note

    try:
        yield
    except KeyboardInterrupt:
        note(f"{run.id} goes on; come back to it: {command}")
        raise
