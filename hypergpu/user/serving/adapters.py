"""Serves what a job fine-tuned: the adapter is merged into its base, and the whole is served.

Importing this imports no torch: the merge is done by a process of its own.
"""

import tempfile
from pathlib import Path

from hypergpu.serving.tuned_model import LATEST
from hypergpu.user.client import Coordinator
from hypergpu.user.client.models import ServedModelView
from hypergpu.user.client.resume import ReportProgress, ignore
from hypergpu.user.serving.starting import ServeOrder, start_serving
from hypergpu.user.training.bases import find_base
from hypergpu.user.training.merging import merge_export


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
        export = Path(scratch) / "export"
        coordinator.export(job_id, export, which=which, report=report)
        merged_folder = merge_export(export, base)
        merged_order = order._replace(base=str(merged_folder), name=order.name or job_id)
        return start_serving(coordinator, merged_order, report=report)
