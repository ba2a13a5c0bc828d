"""Submits a training through a ring: base and rows are made into files, and the job is created."""

import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of_file
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.rings.ring_training import HELD_OUT_ROWS, TRAINING_ROWS
from hypergpu.rings.stage_work import MEMORY_SHARE, STAGE_KIND, CutSizes, memory_for_models
from hypergpu.rings.training_forecast import sent_token_bytes
from hypergpu.serving.serve_request import ServeRequest
from hypergpu.units import Bytes, several
from hypergpu.user.client import Coordinator
from hypergpu.user.client.resume import ReportProgress, ignore
from hypergpu.user.client.values import NodeView
from hypergpu.user.serving.ring_file import RingJob, check_data
from hypergpu.user.serving.stage_files import write_stage_files
from hypergpu.work_units import WorkUnit
from hypergpu.workloads.finetuning.row_files import BASE_FOLDER

_ROWS = "hypergpu.workloads.slices.rows"
_STEP = "sending the base and its rows"


def submit_ring(
    coordinator: Coordinator,
    job: RingJob,
    *,
    report: ReportProgress = ignore,
    tell: Callable[[str], None] = lambda _: None,
) -> str:
    """Create the job of a training through a ring; gives its id.

    Args:
        coordinator: An open connection.
        job: As its file has it.
        report: Told what was sent.
        tell: Told what speaks against a ring, and what its lines will carry.

    Raises:
        HyperGPUError: Base or rows cannot be used, or the job is refused.
    """
    check_data(job)
    base = job.data / BASE_FOLDER
    if not base.is_dir():
        fix = f"put the model that gets the adapter into {base}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"there is no folder {base}", fix=fix)
    with tempfile.TemporaryDirectory(prefix="hypergpu-ring-") as scratch:
        rows = {name: Path(scratch) / name for name in (TRAINING_ROWS, HELD_OUT_ROWS)}
        write_rows_files(job, *rows.values())
        files = write_stage_files(base, Path(scratch), job.dtype)
        for note in ring_notes(job, files.sizes, coordinator.nodes()):
            tell(note)
        paths = {**files.paths, **rows}
        request = ServeRequest(
            model=job.name or _usual_name(base),
            engine=STAGE_KIND,
            files={name: _blob(path) for name, path in paths.items()},
            dtype=job.dtype,
            cut=files.cut(job.stages.count, job.stages.codec),
            training=job.training,
            unit=WorkUnit.LAYER_TOKENS,
            requirements=job.requirements,
            trusted=job.stages.trusted,
            priority=job.priority,
            weight=job.weight,
        )
        request.check()
        coordinator.send_blobs([*paths.values()], step=_STEP, report=report)
    return coordinator.create_serve(request, request_id=uuid.uuid4().hex)


def _usual_name(base: Path) -> str:
    return base.resolve().parent.name if base.resolve().name == BASE_FOLDER else base.resolve().name


def _blob(path: Path) -> BlobRef:
    return BlobRef(digest_of_file(path), Bytes(path.stat().st_size))


def write_rows_files(job: RingJob, train: Path, held_out: Path) -> None:
    """Make tokens of a job's rows, by a process that has transformers.

    Args:
        job: As its file has it.
        train: The file of rows that are trained on.
        held_out: The file of those that are held out.

    Raises:
        HyperGPUError: FILE_UNUSABLE, they cannot be used, with the reason.
    """
    options = msgspec.json.encode(dict(job.options)).decode()
    command = [sys.executable, "-m", _ROWS, str(job.data), options, str(train), str(held_out)]
    command.append(str(job.held_out_rows_most))
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    if process.returncode:
        last_line = process.stderr.strip().rpartition("\n")[2]
        reason, _, fix = last_line.removeprefix("error: ").partition(" Fix: ")
        detail = reason.rstrip(".")
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix or "correct the rows")


def ring_notes(job: RingJob, sizes: CutSizes, nodes: list[NodeView]) -> list[str]:
    """What lines have to carry, and which nodes could train without a ring."""
    stage_bytes = sent_token_bytes(
        job.stages.count, sizes.hidden_size, job.stages.codec, job.stages.gradient_codec
    )
    most_bytes = max(stage_bytes)
    line_note = (
        f"each stage sends up to {most_bytes:,} bytes a token: {8e-3 * most_bytes:.1f} Mbit/s up"
        " for 1,000 tokens/s; the lines are measured before the first step"
    )
    notes = [line_note]
    rings, count = job.training.rings, job.stages.count
    present_count = sum(not node.is_gone for node in nodes)
    if rings > 1 and present_count < rings * count:
        notes.append(
            f"{several(rings, 'ring')} of {several(count, 'stage')} take {rings * count} nodes, and"
            f" {present_count} are there: it begins with the rings that are whole, and takes up"
            " others when nodes come"
        )
    whole = [
        node.name or node.id
        for node in nodes
        if not node.is_gone
        and MEMORY_SHARE * memory_for_models(node.device, node.memory_bytes) >= sizes.total_bytes
    ]
    if whole:
        more = f" and {len(whole) - 1} more" if len(whole) > 1 else ""
        notes.append(
            f"{whole[0]}{more} can hold the base whole: without [stages] it is trained"
            " data-parallel there, which sends updates once a round and not states of every token"
        )
    return notes
