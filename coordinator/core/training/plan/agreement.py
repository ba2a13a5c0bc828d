"""Agreement of a round's updates, and the larger batches that it allows.

Theory of operation. Updates of one model on different samples share what the samples have in
common, and differ by noise. Where noise leads, a larger batch loses nothing by the sample; where
updates agree, fewer steps are less progress. With ``c`` the cosine of two updates of H steps of b
samples each, the noise scale is ``B = H b (1 - c) / c`` samples, and batches of k b need
``(k b + B) / (b + B)`` times the samples (McCandlish et al. 2018, arXiv:1812.06162).
"""

from collections.abc import Sequence
from math import sqrt
from statistics import median
from typing import NamedTuple

from coordinator.core.training.plan.decision import PlanRequest

_COST = 0.02
"""Samples that a larger batch may cost, a part of all: less than rounds differ by chance."""
_SHARE_MOST = 8.0
_GAIN = 1 / 4
"""Weight of the newest round in the mean share."""
_NODES_LEAST = 3
"""Two updates or fewer say little."""


def cosine(agreement: float, inner_steps: Sequence[int]) -> float:
    """The cosine between two updates, on average: 0 when orthogonal, 1 when they go the same way.

    With n updates of norms a and cosines c between them the agreement is ``1 + c (m - 1)``, where
    ``m = (sum a)^2 / sum a^2``: n if the norms are equal, and less if a few outweigh the others.
    Norms are taken to grow with the square root of inner steps, as those of noise do.

    Args:
        agreement: See `PlanRequest.agreement`.
        inner_steps: Of each update, at least two of them.
    """
    count = sum(sqrt(steps) for steps in inner_steps) ** 2 / sum(inner_steps)
    return (agreement - 1) / (count - 1)


class UpdateAgreement(NamedTuple):
    """Agreement of the updates of the round before."""

    cosine: float | None
    """Cosine between two of them, on average; None where it says nothing."""
    noise_share: float
    """Largest batch, over the job's, that costs next to no progress a sample: a mean over rounds,
    at least 1.
    """


def update_agreement(request: PlanRequest) -> UpdateAgreement:
    """Agreement of the updates of the round before, and the batch that it allows."""
    before = request.previous.noise_share if request.previous is not None else 1.0
    update_cosine, stated_batch = _update_cosine(request), request.spec.training.batch_size
    if update_cosine is None:
        return UpdateAgreement(None, before)
    steps = median(
        result.plan.inner_steps * result.plan.batch(stated_batch) / stated_batch
        for result in request.results.values()
        if result.took_ms > 0
    )
    share = (
        _SHARE_MOST
        if update_cosine <= 0
        else 1 + _COST * (1 + steps * (1 - update_cosine) / update_cosine)
    )
    share = min(_SHARE_MOST, max(1.0, share))
    return UpdateAgreement(update_cosine, before + _GAIN * (share - before))


def _update_cosine(request: PlanRequest) -> float | None:
    """Cosine between two updates of the round before; None after a sparse round, as sparse updates
    hardly overlap, and after a round of one or two updates.
    """
    steps = [each.plan.inner_steps for each in request.results.values() if each.took_ms > 0]
    is_sparse = request.previous is None or request.previous.is_sparse
    if request.agreement is None or is_sparse or len(steps) < _NODES_LEAST:
        return None
    return cosine(request.agreement, steps)
