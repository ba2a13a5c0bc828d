"""Used nonces of nodes: each is good for one attempt, and there for each stripe once."""

import asyncio
from typing import NamedTuple

from coordinator.shell.translate import UpdateOffer
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId
from hypergpu.wire.bulk import Stripe


class UploadAttempt(NamedTuple):
    """The upload under a node's newest nonce."""

    offer: UpdateOffer
    stripes: int
    begun_stripes: set[int]
    is_fresh: "asyncio.Future[bool]"
    """Once the nonce is used up durably: whether it was above all before."""


class UploadNonces:
    """Journalled high-water marks of nodes that were heard since the start.

    A nonce at its mark is good only while this process remembers its upload: the same offer in as
    many stripes, and a stripe that has not begun under it.
    """

    def __init__(self) -> None:
        self._marks: dict[NodeId, int] = {}
        self._attempts: dict[NodeId, UploadAttempt] = {}

    def knows(self, node: NodeId) -> bool:
        """Whether the node's mark was read from the journal."""
        return node in self._marks

    def learn(self, node: NodeId, mark: int) -> None:
        """The mark in the journal, which may have been passed meanwhile."""
        self._marks[node] = max(mark, self._marks.get(node, 0))

    def sibling(self, offer: UpdateOffer, stripe: Stripe) -> UploadAttempt | None:
        """The attempt that this stripe belongs to; None when its nonce is a fresh one.

        Raises:
            HyperGPUError: NONCE_REPLAYED.
        """
        mark = self._marks[offer.node]
        if offer.nonce > mark:
            return None
        attempt = self._attempts.get(offer.node)
        if attempt is not None and attempt.offer == offer and attempt.stripes == stripe.count:
            if stripe.index not in attempt.begun_stripes:
                return attempt
            detail = f"stripe {stripe.index} was sent under nonce {offer.nonce} before"
            raise HyperGPUError(Reason.NONCE_REPLAYED, detail)
        raise HyperGPUError(Reason.NONCE_REPLAYED, f"nonce {offer.nonce} is not above {mark}")

    def begin(self, offer: UpdateOffer, stripe: Stripe, is_fresh: "asyncio.Future[bool]") -> None:
        """Use a fresh nonce up."""
        self._marks[offer.node] = max(offer.nonce, self._marks[offer.node])
        self._attempts[offer.node] = UploadAttempt(offer, stripe.count, {stripe.index}, is_fresh)
