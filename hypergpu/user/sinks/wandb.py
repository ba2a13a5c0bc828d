"""Runs of Weights & Biases. Its own settings apply: ``WANDB_MODE=offline``, ``WANDB_DIR``."""

import os
from pathlib import Path
from typing import Any

import wandb

from hypergpu.user.client.values import JobDetail, JobView
from hypergpu.user.sinks.records import SinkRecord


class WandbSink:
    """A run with the job's id, which a second watch goes on with. Implements `Sink`.

    What was written is kept in a small file beside W&B's own, since an offline run cannot be asked.
    """

    def __init__(self, project: str) -> None:
        self._project = project
        self._run: Any = None
        self._cursor = Path()

    def open(self, job: JobDetail) -> int:
        """See `Sink`."""
        folder = Path(os.environ.get("WANDB_DIR") or ".") / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._cursor = folder / f"hypergpu-{job.job.id}.sequence"
        self._run = wandb.init(
            project=self._project,
            id=job.job.id,
            name=job.job.name or job.job.id,
            config=job.spec,
            dir=str(folder.parent),
            resume="allow",
            # Of this machine, which only watches, nothing is told.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_disable_stats=True,
            ),
        )
        for kind in ("round", "evaluation", "pay"):
            self._run.define_metric(f"{kind}/*", step_metric="rounds")
        stored_step = int(self._cursor.read_text("utf-8")) if self._cursor.exists() else 0
        return max(stored_step, int(self._run.step))

    def record(self, record: SinkRecord) -> None:
        """See `Sink`."""
        # W&B's steps may only grow, while an evaluation ends after later rounds.
        self._run.log({**record.named_values(), "rounds": record.round}, step=record.sequence)
        new = self._cursor.with_suffix(".new")
        new.write_text(str(record.sequence + 1), "utf-8")
        new.replace(self._cursor)

    def close(self, job: JobView) -> None:
        """See `Sink`."""
        self._run.summary["phase"] = job.phase
        self._run.finish(exit_code=int(job.phase == "failed"))
