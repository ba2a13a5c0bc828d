"""`JudgeUpdates`: the evaluator measures single updates of a round on held-out data."""

import asyncio

import structlog

from coordinator.core.job.commands import JudgeUpdates
from coordinator.core.job.events import UpdatesJudged
from coordinator.shell.commands.preparation import data_dir
from coordinator.shell.evaluator import messages
from coordinator.shell.failpoints import failpoint
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.runtime.services import Services
from hypergpu.errors import HyperGPUError
from hypergpu.units import Milliseconds

log = structlog.get_logger()

_SAMPLES_MOST = 1_024
"""Enough to tell a useful update from a useless one, and cheap enough to do so each round."""


async def judge(services: Services, runtime: JobRuntime, command: JudgeUpdates) -> None:
    """Answer the command with `UpdatesJudged`, also when nothing can be measured."""
    try:
        event = await _measure_updates(services, runtime, command)
    except HyperGPUError as refused:
        log.warning("updates were not judged", job_id=runtime.job.job_id, reason=str(refused))
        event = give_up_judging(command.round, refused.message)
    failpoint("judge.done")
    reason = await services.driver.insist(runtime.job.job_id, event)
    if reason:
        log.info("a judgement came too late", job_id=runtime.job.job_id, reason=reason)


async def _measure_updates(
    services: Services, runtime: JobRuntime, command: JudgeUpdates
) -> UpdatesJudged:
    if runtime.layout is None:
        return give_up_judging(command.round, "the model's layout is lost")
    blobs = (command.base, command.made, *(update.blob for update in command.updates))
    base, made, *paths = await asyncio.to_thread(
        lambda: [services.blobs.path(blob.digest) for blob in blobs]
    )
    found = await services.evaluator.measure_updates(
        messages.MeasureUpdates(
            workload=command.spec.workload,
            options=command.spec.options,
            data_dir=await data_dir(services, command.manifest),
            layout_digest=runtime.layout.digest,
            base_path=str(base),
            base_digest=command.base.digest,
            made_path=str(made),
            made_digest=command.made.digest,
            updates=tuple(
                messages.UpdateFile(str(path), update.scheme)
                for path, update in zip(paths, command.updates, strict=True)
            ),
            samples_most=_SAMPLES_MOST,
        )
    )
    losses = {
        update.node: loss
        for update, loss in zip(command.updates, found.losses, strict=True)
        if loss is not None
    }
    return UpdatesJudged(
        at_ms=Milliseconds(0),
        round=command.round,
        base_loss=found.base_loss,
        made_loss=found.made_loss,
        losses=losses,
        reason="" if found.base_loss is not None else "the loss of the round's base is not finite",
    )


def give_up_judging(round_number: int, reason: str) -> UpdatesJudged:
    """What stands for the answer where nothing can be measured."""
    return UpdatesJudged(at_ms=Milliseconds(0), round=round_number, reason=reason)
