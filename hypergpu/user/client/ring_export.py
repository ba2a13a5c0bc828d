"""Fetches an adapter that a ring trained, with resume, and writes it as peft loads it."""

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from hypergpu.digests import digest_from_wire, digest_of, digest_of_file
from hypergpu.durable import SHARED, write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.base_files import BASE_INDEX, read_base_index
from hypergpu.rings.ring_adapter import RingAdapter
from hypergpu.rings.stage_work import layer_blob
from hypergpu.user.client.connection import CoordinatorCalls
from hypergpu.user.client.export import (
    CARD_FIELD,
    CARD_NAME,
    JOB_FIELD,
    ExportedModel,
    FetchedBytes,
    WantedBlob,
    fetch_blob,
    fetch_with_resume,
    require_replaceable,
)
from hypergpu.user.client.resume import ReportProgress
from hypergpu.v1 import job_pb2

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_EXPORT = "hypergpu.workloads.slices.adapter_export"
_RING_FILE, _SETTINGS_FOLDER, _ADAPTER_FOLDER = "ring.json", "settings", "adapter"


class RingExportOrder(msgspec.Struct, frozen=True):
    """Which adapter to take where."""

    job_id: str
    folder: Path
    which: str
    may_overwrite: bool

    @property
    def fetched_folder(self) -> Path:
        """Files as they came, until peft's are made of them."""
        return self.folder / f".{self.job_id}-ring"


async def fetch_ring_adapter(
    calls: CoordinatorCalls, order: RingExportOrder, report: ReportProgress
) -> ExportedModel:
    """Fetch the adapter of the newest stored round; an interrupted fetch goes on the next time.

    Raises:
        HyperGPUError: No round is stored, a file arrived damaged, or the folder holds files that
            are not this export's to replace, or cannot be written.
    """
    weights, config = order.folder / ADAPTER_WEIGHTS, order.folder / ADAPTER_CONFIG
    card = order.folder / CARD_NAME
    try:
        if not order.may_overwrite:
            require_replaceable(weights, card, order.job_id)
            if config.exists() and not weights.exists():
                raise HyperGPUError(Reason.FILE_PRESENT, f"{config} is there already")
        answer = await fetch_with_resume(lambda fetched: _fetch(calls, order, fetched, report))
        card_content = answer.model_card.encode("utf-8")
        metadata = {JOB_FIELD: order.job_id, CARD_FIELD: digest_of(card_content)}
        await asyncio.to_thread(_write_adapter, answer, order.fetched_folder, metadata)
        written_folder = order.fetched_folder / _ADAPTER_FOLDER
        (written_folder / ADAPTER_WEIGHTS).replace(weights)
        (written_folder / ADAPTER_CONFIG).replace(config)
        write_durably(card, card_content, mode=SHARED)
        shutil.rmtree(order.fetched_folder)
    except OSError as error:
        detail = f"{order.folder}: {error.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error
    digest = await asyncio.to_thread(digest_of_file, weights)
    return ExportedModel(weights, card, config, digest, weights.stat().st_size)


async def _fetch(
    calls: CoordinatorCalls, order: RingExportOrder, fetched: FetchedBytes, report: ReportProgress
) -> job_pb2.ResolveModelResponse:
    """Fetch what is missing of the newest stored round's files."""
    request = job_pb2.ResolveModelRequest(
        job_id=order.job_id, which=order.which, is_doubted=fetched.is_doubted
    )
    answer: job_pb2.ResolveModelResponse = await calls.call(calls.jobs.ResolveModel, request)
    fetched.is_doubted = False
    adapter = _adapter_of(answer)
    files = {each.path: each for each in answer.files}
    order.fetched_folder.mkdir(parents=True, exist_ok=True)
    for name in (BASE_INDEX, *map(layer_blob, range(adapter.layers))):
        if name not in files:
            detail = f"the coordinator names no file {name} of {order.job_id}"
            raise HyperGPUError(Reason.MODEL_MISSING, detail)
        blob, target = files[name].blob, order.fetched_folder / name
        digest = digest_from_wire(blob.digest.value)
        if target.is_file() and await asyncio.to_thread(digest_of_file, target) == digest:
            continue
        part = target.with_name(f".{name}.part")
        wanted_blob = WantedBlob(name, digest, blob.size_bytes, files[name].ticket, part)
        await fetch_blob(calls, wanted_blob, fetched, report)
        part.replace(target)
    return answer


def _adapter_of(answer: job_pb2.ResolveModelResponse) -> RingAdapter:
    """What was trained.

    Raises:
        HyperGPUError: VERSION_MISMATCH, the coordinator says it in no form that is known here.
    """
    try:
        return msgspec.json.decode(answer.ring_adapter_json, type=RingAdapter)
    except msgspec.MsgspecError as error:
        detail = "the coordinator exports no adapters that rings trained, or of another version"
        fix = "install one version of hypergpu here and there"
        raise HyperGPUError(Reason.VERSION_MISMATCH, detail, fix=fix) from error


def _write_adapter(
    answer: job_pb2.ResolveModelResponse, folder: Path, metadata: dict[str, str]
) -> None:
    """Write peft's files, by a process that has torch.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the files are none of such an adapter, with the reason;
            MANIFEST_INVALID, the index of the base's settings is not right.
    """
    (folder / _RING_FILE).write_text(answer.ring_adapter_json, "utf-8")
    _lay_out_settings(folder / BASE_INDEX, folder / _SETTINGS_FOLDER)
    command = [sys.executable, "-m", _EXPORT, str(folder), msgspec.json.encode(metadata).decode()]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    if process.returncode:
        last_line = process.stderr.strip().rpartition("\n")[2]
        reason, _, fix = last_line.removeprefix("error: ").partition(" Fix: ")
        detail = f"the adapter cannot be written: {reason.rstrip('.')}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix or "export it again")


def _lay_out_settings(index: Path, folder: Path) -> None:
    """Write the base's small files: no others are needed to know the shapes of its layers."""
    for name, content in read_base_index(index.read_bytes()).small_files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
