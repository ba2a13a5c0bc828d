"""`hypergpu.estimate`: what `hypergpu.train` would take, before anything is sent."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Unpack

from hypergpu.user.client import connect
from hypergpu.user.client.forecasts import JobForecastView
from hypergpu.user.training.train import TrainArguments, job_spec

if TYPE_CHECKING:
    from hypergpu.workloads.networks.tracing import Loss, Module


def estimate(
    model: "Module",
    *,
    loss: "Loss | None" = None,  # noqa: ARG001  the arguments of `train`
    **settings: Unpack[TrainArguments],
) -> JobForecastView:
    """Estimate time, bytes and cost of training a model with the nodes that are there.

    Takes what `train` takes, traces nothing, sends settings and the number of parameters, and
    creates no job.

    Args:
        model: As of `train`.
        loss: As of `train`; it is not called.
        settings: As of `train`.

    Raises:
        HyperGPUError: The settings describe no job, or no node that is there can train it.
    """
    spec = job_spec(settings)
    parameters = sum(each.numel() for each in model.parameters())
    given_coordinator = settings.get("coordinator")
    with (
        nullcontext(given_coordinator)
        if given_coordinator is not None
        else connect() as coordinator
    ):
        return coordinator.estimate(spec, parameters=parameters)
