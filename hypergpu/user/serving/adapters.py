"""Serves what a job fine-tuned: the adapter is merged into its base, and the whole is served.

Importing this imports no torch: the merge is done by a process of its own.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.serving.tuned_model import LATEST
from hypergpu.user.client import Coordinator
from hypergpu.user.client.models import ServedModelView
from hypergpu.user.client.resume import ReportProgress, ignore
from hypergpu.user.serving.starting import ServeOrder, start_serving
from hypergpu.user.training.bases import find_base, link_base

_MERGE = "hypergpu.workloads.finetuning.export"


def start_adapter(
    coordinator: Coordinator,
    job: str,
    order: ServeOrder,
    *,
    which: str = LATEST,
    report: ReportProgress = ignore,
) -> ServedModelView:
    """Have a fine-tuning served, which may still be training: its model is taken as it is now.

    Args:
        coordinator: An open connection.
        job: Id or name of the fine-tuning.
        order: Its ``base`` is what the job fine-tunes; its name is the job's id where it has none.
        which: ``latest`` or ``best``.
        report: Told of the bytes that travel.

    Raises:
        HyperGPUError: There is no such job or base, the job has no model of this base yet, or as
            `start_serving`.
    """
    base = find_base(order.base, allow_hub=order.allow_hub)
    job_id = coordinator.find_job(job)
    with tempfile.TemporaryDirectory(prefix="hypergpu-serve-") as scratch:
        export, job_folder = Path(scratch) / "export", Path(scratch) / "job"
        coordinator.export(job_id, export, which=which, report=report)
        job_folder.mkdir()
        link_base(base, job_folder)
        _merge(export, job_folder)
        merged_order = order._replace(base=str(export / "merged"), name=order.name or job_id)
        return start_serving(coordinator, merged_order, report=report)


def _merge(export: Path, job_folder: Path) -> None:
    command = [sys.executable, "-m", _MERGE, str(export), str(job_folder)]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    if process.returncode:
        last_line = process.stderr.strip().rpartition("\n")[2]
        detail = f"the adapter cannot be merged: {last_line.removeprefix('error: ')}"
        fix = "give the base that the job fine-tunes: --base FOLDER"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix)
