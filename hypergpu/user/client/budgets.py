"""Raises the budget of a farm job, with a new signature where its order has one."""

import asyncio

from hypergpu.units import Wei
from hypergpu.user.client.connection import CoordinatorCalls
from hypergpu.user.client.spec_keys import resigned_budget
from hypergpu.v1 import job_pb2
from hypergpu.wire.specs import spec_message, spec_value


async def raise_budget(calls: CoordinatorCalls, job_id: str, budget: int) -> None:
    """Let a farm job cost more; one that paused because its budget was spent goes on.

    A signed order is signed again by this user's key.

    Args:
        calls: The connection.
        job_id: The job.
        budget: The most that it may cost, in the smallest unit of money; more than before.

    Raises:
        HyperGPUError: FILE_UNUSABLE or SIGNATURE_INVALID, the order is signed, and the key is not
            here; as the coordinator refuses it.
    """
    answer = await calls.call(calls.jobs.GetJob, job_pb2.GetJobRequest(job_id=job_id))
    parameters = {"budget": str(budget)}
    request = job_pb2.SetParametersRequest(job_id=job_id, parameters=parameters)
    if answer.HasField("signed_spec"):
        before = spec_value(answer.signed_spec)
        order = await asyncio.to_thread(resigned_budget, calls, before, Wei(budget))
        request.signed_spec.CopyFrom(spec_message(order))
    await calls.call(calls.jobs.SetParameters, request)
