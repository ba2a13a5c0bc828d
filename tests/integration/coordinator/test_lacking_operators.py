"""A program that calls an operator which a node's torch lacks."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hypergpu
from hypergpu.programs.container import VERSION
from hypergpu.user.client import Coordinator, JobEvent
from tests.node_client import NOBODY_LOST, WireNode
from tests.processes import CoordinatorProcess

DATA = {"x": np.ones((40, 8), np.float32), "y": np.ones((40, 2), np.float32)}
LACKING = "aten.linear.default"
REASON = f"its torch 2.6.0 lacks {LACKING}, which the model calls. Fix there: pip install -U torch"


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def prepared_job(client: Coordinator) -> str:
    """Train a program; gives the job once its first model is made."""
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    job = hypergpu.train(model, loss=loss, data=DATA, coordinator=client, batch_size=4, rounds=1)
    for update in client.watch(job.id):
        if isinstance(update, JobEvent) and update.kind == "ModelInitialised":
            break
    return job.id


async def test_such_a_node_gets_no_work_and_is_named_with_the_reason_and_the_fix(
    tmp_path: Path,
) -> None:
    coordinator = CoordinatorProcess(tmp_path, *NOBODY_LOST)
    try:
        coordinator.start()
        node = WireNode(coordinator.address, coordinator.node_address)
        node.lacking_operators = (LACKING, "aten.add.Tensor")
        await node.join(coordinator.node_token())
        control = node.control([("program", VERSION)])
        await anext(control)  # the welcome
        with coordinator.client() as client:
            job_id = await asyncio.to_thread(prepared_job, client)
            detail, (view,) = client.job(job_id), client.nodes()
            job_events = [*client.read_events(job_id).until_newest()]
        assert [(each.id, each.reason) for each in detail.unfit] == [(node.node_id, REASON)]
        assert (view.state, view.reason) == ("idle", f"not for {job_id}: {REASON}")
        why = f"0 of 1 nodes fit; another one does not: {REASON}"
        assert (detail.job.phase, detail.job.reason) == ("waiting", why)
        # Where it was lent before the model was there, it left before that.
        besides = {"NodeJoined", "EvaluationReady"}
        kinds = [event.kind for event in job_events if event.kind not in besides]
        assert kinds[0] == "JobCreated"
        assert kinds[-1] == "ModelInitialised"
        assert [each.body["reason"] for each in job_events if each.kind == "NodeDraining"] in (
            [],
            [REASON],
        )
        await node.close()
    finally:
        coordinator.end()
