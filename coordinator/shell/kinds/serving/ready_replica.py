"""A replica that answers calls, as the coordinator has it."""

from collections import Counter

from coordinator.shell.kinds.serving.open_call import OpenCall
from coordinator.shell.kinds.serving.replica_link import ReplicaLink
from coordinator.shell.kinds.serving.token_counter import AnswerCounter
from coordinator.shell.nodes.control_stream import ControlStream
from hypergpu.ids import NodeId
from hypergpu.serving.calls import ReplicaReady
from hypergpu.serving.tuned_model import Tuning


class ReadyReplica:
    """A replica that answers calls."""

    def __init__(
        self,
        node: NodeId,
        lease: int,
        link: ReplicaLink,
        ready: ReplicaReady,
        counter: AnswerCounter | None,
    ) -> None:
        self.node = node
        self.lease = lease
        self.counter = counter
        self.link = link
        self.ready = ready
        self.ms_per_token = 0.0
        self.calls: dict[int, OpenCall] = {}
        self.offer = 0
        """Number of the offer of a version that it is taking up; 0: none."""
        self.offered = 0
        """The version of that offer."""
        self.failed_offers: Counter[int] = Counter()
        """Offers that failed, by their versions."""

    def is_of(self, lease: int, stream: ControlStream) -> bool:
        """Whether it is what a node has under a lease, and says so on this stream."""
        return self.lease == lease and self.link.is_on(stream)

    def holds_version_of(self, call: OpenCall) -> bool:
        """Whether it can go on with a call by the version that its answer began with."""
        version = call.version
        return version is None or not call.tokens_out or version in self.ready.versions

    def rounds_behind(self, newest: Tuning | None) -> int:
        """Rounds between the newest version of a training's model and the newest that it holds."""
        version = self.ready.newest_version
        return 0 if newest is None or version is None else newest.version.round - version
