"""A job of the demo in which nothing depends on time, watched to the digest of its model."""

from pathlib import Path

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.cli.demo.following import Fault, follow_job
from hypergpu.user.client import Coordinator


def follow_fixed(coordinator: Coordinator, job_id: str, title: str, fault: Fault, out: Path) -> str:
    """Watch a job to its end, and export its model.

    Returns:
        Digest of the model.

    Raises:
        HyperGPUError: DEMO_MISSED, the job did not finish, or a node was lost.
    """
    nodes = coordinator.spec(job_id).training.nodes
    history = follow_job(coordinator, job_id, title, fault).history
    if any(point.updates != nodes for point in history.rounds):
        detail = "a node was lost, so that its work was done by others and the model is another one"
        raise HyperGPUError(Reason.DEMO_MISSED, detail, fix="run it on a machine that is less busy")
    return coordinator.export(job_id, out, may_overwrite=True).digest
