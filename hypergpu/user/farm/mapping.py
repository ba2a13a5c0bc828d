"""`hypergpu.map`: data become the items of a farm job."""

import itertools
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of, digest_of_file
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.base_files import BASE_INDEX
from hypergpu.farm.item_chunks import manifest_bytes
from hypergpu.farm.map_request import MapRequest
from hypergpu.programs.container import ProgramError
from hypergpu.programs.samples import FieldArrays, SamplesError, stored_array
from hypergpu.units import Bytes
from hypergpu.user.client import Coordinator
from hypergpu.user.client.resume import ReportProgress
from hypergpu.user.farm.base_parts import base_parts
from hypergpu.user.farm.input_chunks import (
    MANIFEST,
    ChunkedItems,
    write_array_chunks,
    write_text_chunks,
)
from hypergpu.user.farm.item_rules import ItemForm
from hypergpu.user.farm.items import ItemFields, ItemSource
from hypergpu.user.farm.map_run import MapRun
from hypergpu.user.farm.output_folder import OutputFolder, RunState
from hypergpu.user.farm.pieces import RowContext
from hypergpu.user.farm.request import MapSettings, base_path, map_request, settings_of
from hypergpu.user.terminal.output import progress_bars, progress_note
from hypergpu.user.training.datasets import DataSource
from hypergpu.user.training.train import connect_until_exit

if TYPE_CHECKING:
    from hypergpu.workloads.networks.tracing import Module

_STEP = "sending items"


class MapOrder(NamedTuple):
    """A farm job that is to be started, or gone on with."""

    settings: MapSettings
    data: Any
    out: Path
    module: "Module | None" = None
    """The user's own module, of the kind ``program``."""
    may_resume: bool = False
    may_overwrite: bool = False
    limit: int = 0
    """Items to take, from the first; 0: all."""


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


def map(
    kind: "str | Module",
    data: Any,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    force: bool = False,
    coordinator: Coordinator | None = None,
    **settings: Any,
) -> MapRun:
    """Have every item of some data done on the nodes that are there. It is `hypergpu.map`.

    Returns as soon as the items are there; `MapRun.result` waits for the values.

    Args:
        kind: ``embed``, ``score``, ``generate`` or ``classify``; or a torch module of one's own,
            which is traced, runs forward only, and gives one tensor whose first dimension is items.
        data: Of texts: a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, a folder of text
            files, a DataFrame, a ``datasets.Dataset``, or a list. Of a module: what
            `hypergpu.train` takes; the module gets the fields in order.
        out: File to write, which ends in ``.jsonl`` or ``.parquet``; without one the values are
            kept until the program ends.
        resume: Whether to go on with an unfinished run of the same output.
        force: Whether to replace an output, or an unfinished run.
        coordinator: An open connection; else the one that environment, settings file or
            `hypergpu up` name.
        settings: Fields of `MapSettings`, such as ``base``, ``parameters``, ``seed`` or ``price``.

    Raises:
        HyperGPUError: Data or settings cannot be used, the output is there already, or the job is
            refused. The text says what to do.
    """
    module = None if isinstance(kind, str) else kind
    map_settings = settings_of(kind if isinstance(kind, str) else "program", settings)
    coordinator = coordinator or connect_until_exit()
    if out is not None:
        order = MapOrder(map_settings, data, Path(out), module, resume, force)
        return start_map(coordinator, order)
    scratch = Path(tempfile.mkdtemp(prefix="hypergpu-"))
    try:
        order = MapOrder(map_settings, data, scratch / "values.parquet", module)
        run = start_map(coordinator, order)
    except BaseException:
        shutil.rmtree(scratch)
        raise
    weakref.finalize(run, shutil.rmtree, scratch, ignore_errors=True)
    return run


def start_map(coordinator: Coordinator, order: MapOrder) -> MapRun:
    """Start a farm job, or go on with the one that its output's folder names.

    Raises:
        HyperGPUError: As `map`.
    """
    order.settings.check()
    folder = OutputFolder(order.out)
    state = folder.begin(may_resume=order.may_resume, may_overwrite=order.may_overwrite)
    try:
        return _start(coordinator, order, folder, state)
    except BaseException:
        folder.close()
        raise


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
    items, files = (_program_parts if order.module is not None else _text_parts)(order, folder)
    manifest = folder / MANIFEST
    manifest.write_bytes(manifest_bytes(items.manifest))
    request = map_request(
        order.settings,
        items.manifest,
        _blob(manifest),
        {name: _blob(path) for name, path in files.items()},
        largest_bytes=items.largest_bytes,
    )
    request.check()
    return PreparedMap(request, (*files.values(), *items.paths, manifest), items)


def _blob(path: Path) -> BlobRef:
    try:
        return BlobRef(digest_of_file(path), Bytes(path.stat().st_size))
    except OSError as error:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path}: {error.strerror}") from error


_Parts = tuple[ChunkedItems, dict[str, Path]]


def _text_parts(order: MapOrder, folder: Path) -> _Parts:
    settings = order.settings
    form = settings.rules.form
    if form is ItemForm.ARRAYS:
        detail = "the kind program needs a module of one's own"
        fix = "give it from Python: hypergpu.map(module, data=...)"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    files: dict[str, Path] = {}
    base = base_path(settings)
    if base is not None:
        parts = base_parts(base)
        files[BASE_INDEX] = folder / BASE_INDEX
        files[BASE_INDEX].write_bytes(parts.index_content)
        files |= parts.large_files
    fields = ItemFields(settings.text_field, settings.id_field)
    items = ItemSource(order.data, form, fields).items()
    chosen_items = itertools.islice(items, order.limit) if order.limit else items
    return write_text_chunks(chosen_items, folder), files


def _program_parts(order: MapOrder, folder: Path) -> _Parts:
    # Imported here: it needs torch, which takes seconds.
    from hypergpu.workloads.networks.forward_program import forward_program

    if order.module is None:
        raise HyperGPUError(Reason.ARGUMENT_INVALID, "there is no module", fix="give one")
    with _translating():
        batches = DataSource(order.data, "data").batches
        first = next(_program_batches(batches(), 0), None)
        if first is None:
            return write_array_chunks([], folder), {}
        program = forward_program(order.module, first)
        items = write_array_chunks(_program_batches(batches(), order.limit), folder)
    files = {name: folder / name for name in ("program", "tensors")}
    files["program"].write_bytes(program.program)
    files["tensors"].write_bytes(program.tensors)
    return items, files


def _program_batches(batches: Iterator[FieldArrays], limit: int) -> Iterator[Mapping[str, Any]]:
    """Batches as programs take them, of ``limit`` items in all unless that is 0."""
    count = 0
    for batch in batches:
        size = len(next(iter(batch.values())))
        kept_size = min(size, limit - count) if limit else size
        if kept_size <= 0:
            return
        count += kept_size
        yield {
            name: np.asarray(stored_array("data", name, array[:kept_size]))
            for name, array in batch.items()
        }


class _translating:  # noqa: N801 - used as a function is
    """Errors of programs and samples as those of HyperGPU."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, ProgramError | SamplesError):
            detail, _, fix = str(error).partition(" Fix: ")
            raise HyperGPUError(
                Reason.ARGUMENT_INVALID, detail.rstrip("."), fix=fix or "see docs/farm.md"
            ) from error
