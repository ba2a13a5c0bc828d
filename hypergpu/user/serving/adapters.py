"""Serves what a job fine-tuned: the adapter is merged into its base, and the whole is served."""

import tempfile
from pathlib import Path

from hypergpu.user.client import Coordinator
from hypergpu.user.client.models import ServedModelView
from hypergpu.user.client.resume import ReportProgress, ignore
from hypergpu.user.serving.starting import ServeOrder, start_serving
from hypergpu.user.training.bases import find_base
from hypergpu.user.training.finetune import AdapterRun

LATEST, BEST = "latest", "best"
"""The newest model of a job, and the best that was evaluated."""


def start_adapter(
    coordinator: Coordinator,
    run: AdapterRun,
    order: ServeOrder,
    *,
    which: str = LATEST,
    report: ReportProgress = ignore,
) -> ServedModelView:
    """Have a fine-tuning served, which may still be training: its model is taken as it is now.

    Args:
        coordinator: An open connection.
        run: Knows its base.
        order: Its ``base`` is not looked at; its name is the job's id where it has none.
        which: `LATEST` or `BEST`.
        report: Told of the bytes that are sent.

    Raises:
        HyperGPUError: The job has no model yet, or as `start_serving`.
    """
    with tempfile.TemporaryDirectory(prefix="hypergpu-serve-") as folder:
        run.save(folder, which)
        merged_order = order._replace(base=str(Path(folder) / "merged"), name=order.name or run.id)
        return start_serving(coordinator, merged_order, report=report)


def run_of_job(
    coordinator: Coordinator, job: str, base: str, *, allow_hub: bool = False
) -> AdapterRun:
    """A fine-tuning that was begun before.

    Args:
        coordinator: An open connection.
        job: Its id or name.
        base: Folder of the base that it trains an adapter of, or its name on the hub.
        allow_hub: Whether a base that is not on this machine is downloaded.

    Raises:
        HyperGPUError: There is no such job, or no such base.
    """
    folder = find_base(base, allow_hub=allow_hub)
    return AdapterRun(coordinator, coordinator.find_job(job), folder)
