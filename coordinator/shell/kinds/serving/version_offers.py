"""Offers replicas the newest version of the training that their model follows.

A version travels as the delta that leads to it, where the replica holds the version before, else as
a whole adapter. Its node fetches the blob that the offer names, and the replica says what it holds.
"""

from collections.abc import Callable, Iterable

import structlog
from msgspec.structs import replace

from coordinator.shell.kinds.serving.ready_replica import ReadyReplica
from hypergpu.ids import Digest
from hypergpu.serving.calls import AnswerPart, AnswerRefused, VersionTaken
from hypergpu.serving.tuned_model import VersionOffer

log = structlog.get_logger()
_OFFERS_MOST = 2
"""Offers of one version to one replica: the second one is of the whole adapter."""


class VersionOffers:
    """Offers of one served model.

    Args:
        newest_offer: Gives the newest version; None: the model follows no training.
        next_number: Gives numbers of calls.
    """

    def __init__(
        self,
        newest_offer: Callable[[], VersionOffer | None],
        next_number: Callable[[], int],
    ) -> None:
        self._newest_offer = newest_offer
        self._next_number = next_number
        self._digests: dict[int, Digest] = {}
        """Digests of versions, by their rounds."""

    def send(self, replicas: Iterable[ReadyReplica]) -> None:
        """Offer the newest version to those that hold an older one, one offer at a time each."""
        offer = self._newest_offer()
        if offer is None:
            return
        newest_round = offer.version.round
        self._digests[newest_round] = offer.version.blob.digest
        for replica in replicas:
            version = replica.ready.newest_version
            failures = replica.failed_offers[newest_round]
            is_behind = version is not None and version < newest_round
            if is_behind and not replica.offer and failures < _OFFERS_MOST:
                self._send(replica, offer, is_whole=failures > 0)

    def _send(self, replica: ReadyReplica, offer: VersionOffer, *, is_whole: bool) -> None:
        delta, version = offer.delta, replica.ready.newest_version
        if is_whole or delta is None or self._digests.get(version or 0) != delta.base:
            offer = replace(offer, delta=None)
        replica.offer, replica.offered = self._next_number(), offer.version.round
        replica.link.send_offer(replica.offer, offer)

    def end(self, replica: ReadyReplica, parts: list[AnswerPart]) -> None:
        """Note what came of an offer: one that failed is made once more, of the whole adapter."""
        if not any(isinstance(part, VersionTaken) for part in parts):
            replica.failed_offers[replica.offered] += 1
            refusals = [part.reason for part in parts if isinstance(part, AnswerRefused)]
            reason = refusals[0] if refusals else "its node cannot fetch it"
            log.warning("a version was not taken up", node=replica.node, reason=reason)
        replica.offer = 0
