"""Chains of deltas that lead from one model of a job to another."""

from coordinator.core.training.job.state import Model
from hypergpu.assignment import Delta
from hypergpu.ids import Digest
from hypergpu.units import Bytes

DELTAS_MOST = 16
_SHARE = 2
"""Together they stay below one half of a model: beyond it the whole model is not much more."""


def extend_chain(base: Model, delta: Delta, model_bytes: Bytes) -> tuple[Delta, ...]:
    """The deltas of the model that ``delta`` makes of ``base``: the newest of them, the last it.

    The newest one is kept whatever its size.
    """
    chain = (*base.deltas, delta)[-DELTAS_MOST:]
    while len(chain) > 1 and _SHARE * sum(each.blob.size_bytes for each in chain) >= model_bytes:
        chain = chain[1:]
    return chain


def initial_of(model: Model) -> Digest | None:
    """The job's first model, where ``model`` is it or its deltas lead on from it."""
    if len(model.deltas) != model.round:
        return None
    return model.deltas[0].base if model.deltas else model.blob.digest
