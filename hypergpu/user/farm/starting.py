"""Starts farm jobs, and goes on with them: items and files are sent, a job is created once."""

import itertools
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of, digest_of_file
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.base_files import BASE_INDEX
from hypergpu.farm.item_chunks import manifest_bytes
from hypergpu.farm.map_request import MapRequest
from hypergpu.units import Bytes
from hypergpu.user.client import Coordinator
from hypergpu.user.client.resume import ReportProgress
from hypergpu.user.farm.base_parts import base_parts
from hypergpu.user.farm.input_chunks import MANIFEST, ChunkedItems, write_text_chunks
from hypergpu.user.farm.item_rules import ItemForm
from hypergpu.user.farm.items import ItemFields, ItemSource
from hypergpu.user.farm.map_run import MapRun
from hypergpu.user.farm.output_folder import OutputFolder, RunState
from hypergpu.user.farm.pieces import RowContext
from hypergpu.user.farm.request import MapSettings, map_request
from hypergpu.user.terminal.output import progress_bars, progress_note
from hypergpu.user.training.bases import find_base

_STEP = "sending items"


_OTHERWISE = {
    ItemForm.ARRAYS: (
        "the kind program needs a module of one's own",
        "give it from Python: hypergpu.map(module, data=...)",
    ),
    ItemForm.POINT: (
        "the kind sweep needs the job of which its points are",
        "hypergpu sweep JOB.toml --grid KEY=VALUE,VALUE",
    ),
}
"""Forms of items that no file of rows has: what is wrong, and what helps."""


class JobParts(NamedTuple):
    """Items of a job, and its further files by name."""

    items: ChunkedItems
    files: dict[str, Path]
    units_most: int = 0
    """Units of an item at most; 0: by its kind."""


def text_parts(order: "MapOrder", folder: Path) -> JobParts:
    """Items of rows, and the files of their base.

    Raises:
        HyperGPUError: Data or base cannot be used.
    """
    settings = order.settings
    form = settings.rules.form
    if form in _OTHERWISE:
        detail, fix = _OTHERWISE[form]
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    files: dict[str, Path] = {}
    if settings.base:
        parts = base_parts(find_base(settings.base, allow_hub=settings.allow_hub))
        files[BASE_INDEX] = folder / BASE_INDEX
        files[BASE_INDEX].write_bytes(parts.index_content)
        files |= parts.large_files
    fields = ItemFields(settings.text_field, settings.id_field)
    items = ItemSource(order.data, form, fields).items()
    chosen_items = itertools.islice(items, order.limit) if order.limit else items
    return JobParts(write_text_chunks(chosen_items, folder), files)


class MapOrder(NamedTuple):
    """A farm job that is to be started, or gone on with."""

    settings: MapSettings
    data: Any
    out: Path
    may_resume: bool = False
    may_overwrite: bool = False
    limit: int = 0
    """Items to take, from the first; 0: all."""
    read: Callable[["MapOrder", Path], JobParts] = text_parts
    """Writes items and files into a folder."""


class PreparedMap(NamedTuple):
    """Items and files of a job, as they lie on this machine, and its request."""

    request: MapRequest
    paths: tuple[Path, ...]
    """All that has to be sent."""
    items: ChunkedItems

    @property
    def size_bytes(self) -> int:
        """Size of what has to be sent."""
        return sum(path.stat().st_size for path in self.paths)


def start_map(coordinator: Coordinator, order: MapOrder) -> MapRun:
    """Start a farm job, or go on with the one that its output's folder names.

    Raises:
        HyperGPUError: As `hypergpu.map`.
    """
    order.settings.check()
    if order.settings.unit_price and not int(order.settings.budget or 0):
        fix = (
            "state the most that it may cost: --budget AMOUNT; --estimate tells what all items cost"
        )
        raise HyperGPUError(Reason.ARGUMENT_INVALID, "a job with a price needs a budget", fix=fix)
    folder = OutputFolder(order.out)
    state = folder.begin(may_resume=order.may_resume, may_overwrite=order.may_overwrite)
    try:
        return _start(coordinator, order, folder, state)
    except BaseException:
        folder.close()
        raise


def start_in_scratch(coordinator: Coordinator, order: MapOrder) -> MapRun:
    """Start a job whose output lies in a temporary folder, which goes with the run."""
    scratch = Path(tempfile.mkdtemp(prefix="hypergpu-"))
    try:
        run = start_map(coordinator, order._replace(out=scratch / "values.parquet"))
    except BaseException:
        shutil.rmtree(scratch)
        raise
    weakref.finalize(run, shutil.rmtree, scratch, ignore_errors=True)
    return run


def _start(
    coordinator: Coordinator, order: MapOrder, folder: OutputFolder, state: RunState | None
) -> MapRun:
    with progress_note("reading items"):
        job_input = prepare_map(order, folder.input)
    request_digest = digest_of(msgspec.msgpack.encode(job_input.request))
    if state is not None and state.request_digest != request_digest:
        detail = f"the unfinished run in {folder.path} had other data or other settings"
        fix = "give what it was given, or begin anew: --force"
        raise HyperGPUError(Reason.FILE_PRESENT, detail, fix=fix)
    if job_input.items.ids:
        folder.write_ids(job_input.items.ids)
    if job_input.items.reasons:
        folder.write_reasons(job_input.items.reasons)
    if state is None:
        state = RunState(request_id=uuid.uuid4().hex, request_digest=request_digest)
        folder.write_state(state)
    job_id = state.job
    if not job_id:
        with progress_bars() as report:
            job_id = _create(coordinator, job_input, state.request_id, report)
        folder.write_state(msgspec.structs.replace(state, job=job_id))
    folder.drop_input()
    context = RowContext(job_input.items.ids, job_input.items.reasons, order.settings.seed)
    return MapRun(coordinator, job_id, folder, order.settings.rules, context)


def _create(
    coordinator: Coordinator, job_input: PreparedMap, request_id: str, report: ReportProgress
) -> str:
    coordinator.send_blobs(job_input.paths, step=_STEP, report=report)
    return coordinator.create_map(job_input.request, request_id=request_id)


def prepare_map(order: MapOrder, folder: Path) -> PreparedMap:
    """Write items and files of a job into a folder, and make its request; nothing is sent.

    Raises:
        HyperGPUError: Data, base or module cannot be used.
    """
    items, files, units_most = order.read(order, folder)
    manifest = folder / MANIFEST
    manifest.write_bytes(manifest_bytes(items.manifest))
    request = map_request(
        order.settings,
        items.manifest,
        _blob(manifest),
        {name: _blob(path) for name, path in files.items()},
        largest_bytes=items.largest_bytes,
        units_most=units_most,
    )
    request.check()
    return PreparedMap(request, (*files.values(), *items.paths, manifest), items)


def _blob(path: Path) -> BlobRef:
    try:
        return BlobRef(digest_of_file(path), Bytes(path.stat().st_size))
    except OSError as error:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path}: {error.strerror}") from error
