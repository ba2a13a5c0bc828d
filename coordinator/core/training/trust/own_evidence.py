"""Measures of one update against the gradient of the samples that its node was assigned."""

import msgspec


class OwnEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """An update held against the loss of secret samples of its own shard, at its own base."""

    cosine: float
    """With the gradient of that loss, over all coordinates."""
    layers: tuple[float, ...] = ()
    """The same of each group of layers."""
    steepness: float
    """Length of that gradient."""
    loss: float | None = None
    """Mean loss of those samples at the base; None: the update was not tried."""
    loss_after: float | None = None
    """Their loss at the base less the update; infinite where it is not finite."""
