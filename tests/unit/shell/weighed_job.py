"""A job whose round has closed with some updates, over a whole shell without processes."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from coordinator.core.training.job.commands import Aggregate, FoldedUpdate
from coordinator.core.training.job.state import Job, Model
from coordinator.core.training.job.trust_memory import TrustMemory
from coordinator.core.work.work_events import StampedEvent
from coordinator.shell.aggregation.layer_groups import LayerGroups
from coordinator.shell.aggregation.measurements import HeldOutGradient
from coordinator.shell.aggregation.sketch import SketchKey, sketch_vector
from coordinator.shell.driver.driver import Driver
from coordinator.shell.kinds.table import KINDS
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.kinds.training.weighing import WeighedRound
from hypergpu.blobs import BlobRef
from hypergpu.ids import JobId, NodeId, Slot
from hypergpu.jobfile.spec import Outer
from hypergpu.tensors.codec import encode_update
from hypergpu.tensors.layout import Flat, Float32s
from tests.journals import FolderJournal
from tests.unit.aggregation.fold_files import LAYOUT, random_flat
from tests.unit.shell.whole_shell import JOB, SPEC, WholeShell, services_in

NAMES = tuple(NodeId(f"node-{number}") for number in range(6))
SLOPE: Float32s = random_flat(99).parameters
"""Gradient of the held-out loss."""


class CollectingDriver(Driver):
    """Accepts every event, and keeps it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FolderJournal(folder), KINDS)
        self.reported: list[StampedEvent] = []

    async def insist(self, job_id: JobId, event: StampedEvent) -> str:
        self.reported.append(event)
        return ""


def honest_update(seed: int) -> Float32s:
    """The update of a node that went down the slope, and elsewhere by chance."""
    vector: Float32s = SLOPE + 2 * random_flat(seed).parameters
    return vector


class WeighedJob:
    """A job whose round has closed with some updates."""

    def __init__(self, folder: Path, *vectors: Float32s, codec: str = "fp32") -> None:
        self.driver = CollectingDriver(folder / "driver")
        self.services: WholeShell = services_in(folder).replace(driver=self.driver)
        base = self.put(random_flat(0))
        self.runtime = JobRuntime(Job(job_id=JOB, spec=SPEC, model=Model(4, base)), 0)
        self.runtime.layout = LAYOUT
        self.command = Aggregate(
            round=4,
            base=Model(4, base),
            updates=self.updates(vectors, codec),
            spec=SPEC,
            down="fp32",
            outer=Outer(),
            outer_reason="",
            trust=TrustMemory(rounds=4),
            weighing=None,
            manifest=None,
        )

    def put(self, flat: Flat) -> BlobRef:
        return self.services.blobs.put(b"".join(part.tobytes() for part in flat), keep_s=-1)

    def updates(self, vectors: Sequence[Float32s], codec: str = "fp32") -> tuple[FoldedUpdate, ...]:
        still = random_flat(0)
        payloads = [
            encode_update(LAYOUT, codec, Flat(vector, still.statistics, still.integers)).payload
            for vector in vectors
        ]
        blobs = [self.services.blobs.put(each.tobytes(), keep_s=-1) for each in payloads]
        return tuple(
            FoldedUpdate(node, Slot(slot), blob, 10, codec, inner_steps=8)
            for slot, (node, blob) in enumerate(zip(NAMES, blobs, strict=False))
        )

    def with_gradient(
        self,
        loss: float | None = 1.0,
        model: BlobRef | None = None,
        groups: LayerGroups | None = None,
    ) -> None:
        """The evaluator has differentiated the loss at a model; None: at the base."""
        secret = blake3(JOB.encode(), key=self.services.training.weighing.secret).digest()
        sketch = sketch_vector(SketchKey(secret), LAYOUT, SLOPE, groups)
        digest = (model or self.command.base.blob).digest
        self._know(HeldOutGradient(digest, loss, sketch))

    def without_gradient(self) -> None:
        """The evaluator could not do it."""
        self._know(None)

    def _know(self, found: HeldOutGradient | None) -> None:
        gradient_future: asyncio.Future[HeldOutGradient | None] = (
            asyncio.get_running_loop().create_future()
        )
        gradient_future.set_result(found)
        task = asyncio.ensure_future(_result_of(gradient_future))
        self.runtime.measurements.gradients[self.command.base.blob.digest] = task

    async def weigh(self) -> WeighedRound:
        return await self.services.training.weighing.weigh_round(self.runtime, self.command)


async def _result_of(
    known: "asyncio.Future[HeldOutGradient | None]",
) -> HeldOutGradient | None:
    return await known
