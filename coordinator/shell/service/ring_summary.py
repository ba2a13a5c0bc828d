"""What a job's summary says of a training through a ring."""

from coordinator.core.serving.state import ServeJob
from hypergpu.v1 import job_pb2


def add_ring_training(summary: job_pb2.JobSummary, job: ServeJob) -> None:
    """Rounds and loss of a training through a ring; nothing of other models."""
    if job.request.training is None:
        return
    summary.rounds = job.request.training.rounds
    if (stored_round := job.stored_round) is not None:
        held_out_loss = stored_round.held_out_loss
        summary.round = stored_round.rounds
        summary.loss = stored_round.loss if held_out_loss is None else held_out_loss
