"""A node's control stream: what is queued for it, and how often it is to be heard."""

from typing import NamedTuple

from coordinator.core.hub.heartbeats import StreamPace, UsualPace
from coordinator.core.work.waiting_kinds import WaitingKinds
from coordinator.shell.translate import Capabilities
from hypergpu.clock import monotonic_ms
from hypergpu.ids import JobId, NodeId
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2
from hypergpu.wire.outbox import MessageOutbox

_OUTBOX_MESSAGES = 256
_FIRST = frozenset({"welcome", "heartbeat_echo", "round_trip_echo"})
"""Messages that go before all that waits."""


class QueuedMessage(NamedTuple):
    """A message that waits to be written."""

    message: node_pb2.ControlResponse
    content: bytes = b""
    """Bytes of a blob that goes beside it; streams share them until they are written."""


class BlobRoom:
    """Bytes of blobs that wait in streams to be written."""

    def __init__(self) -> None:
        self.used_bytes = 0


class ControlStream:
    """A node's control stream."""

    address_digest: str = ""
    """Digest of the address that the node dials from; empty: it is not known."""
    waiting_kinds: WaitingKinds = ()
    """Kinds of work that it was told last to get none of."""
    signs_results: bool = True
    """Whether it signs results of packed work; a node of an earlier version does not."""
    signs_counts: bool = True
    """Whether it signs counts of what it gave in answer to calls; nor does that."""
    queues_work: bool = False
    """Whether it takes the next packed work of a job while it does one."""
    working_leases: frozenset[tuple[JobId, int]] = frozenset()
    """Jobs and leases of the work that it had when it dialled in."""

    def __init__(self, node: NodeId, capabilities: Capabilities, software: str) -> None:
        self.node = node
        self.capabilities = capabilities
        self.software = software
        self.features = capabilities.features(software)
        """What jobs may require of the node."""
        self.recalled_from: set[JobId] = set()
        """Jobs that gave it up for others; one that has no work for it is not lent it again."""
        self.informed_of_terms: set[JobId] = set()
        """Jobs whose terms it has been told with a receipt."""
        self.known_address = ""
        """Address by which the node unpacks others; empty: it is told whole ones."""
        self.takes_blobs = False
        """Whether the node takes a blob beside an assignment."""
        self.room = BlobRoom()
        """Blobs that wait in this stream and in those that it shares the room with."""
        self.unwritten_bytes = 0
        """Bytes of blobs that wait in this stream."""
        self.fetched_ms: Milliseconds | None = None
        """When the node was last left to fetch a blob that measures its line; None: never."""
        self.known_coordinators: tuple[str, ...] = ()
        """Addresses of the other coordinators that it was told of."""
        self.is_watched = False
        """A gateway ends it when its node is silent: it may say nothing for any length of time."""
        self.pace = StreamPace.begin(UsualPace())
        """How often its heartbeats come; a greeting changes it."""
        self.outbox: MessageOutbox[QueuedMessage] = MessageOutbox()

    def note_abilities(self, hello: node_pb2.Hello) -> None:
        """Take over what the node says that it understands."""
        self.takes_blobs = hello.takes_blobs
        self.signs_results = hello.signs_results
        self.signs_counts = hello.signs_counts
        self.queues_work = hello.queues_work
        self.working_leases = frozenset((JobId(each.job_id), each.number) for each in hello.working)

    def send(self, message: node_pb2.ControlResponse, content: bytes = b"") -> None:
        """Queue a message; a node that takes none in is cut off, and told again when it is back.

        Greetings and signs of life go before all that waits: hidden states of rings may be large.

        Args:
            message: To be sent.
            content: Of a blob, only to a node that takes blobs; empty: none.
        """
        if self.outbox.messages >= _OUTBOX_MESSAGES:
            self.close()
            return
        goes_first = message.WhichOneof("message") in _FIRST
        self.outbox.put(QueuedMessage(message, content), goes_first=goes_first)
        self._count_unwritten(len(content))
        if message.HasField("assignment"):
            self.note_work()

    def note_written(self, queued: QueuedMessage) -> None:
        """Note that a message was written."""
        self._count_unwritten(-len(queued.content))

    def release_room(self) -> None:
        """Note that nothing of what waits will be written."""
        self._count_unwritten(-self.unwritten_bytes)

    def _count_unwritten(self, more_bytes: int) -> None:
        self.unwritten_bytes += more_bytes
        self.room.used_bytes += more_bytes

    def note_work(self) -> None:
        """Note a sign of work: its node is heard every few seconds for a while."""
        self.pace = self.pace.after_work(monotonic_ms())

    @property
    def silence_limit_ms(self) -> Milliseconds | None:
        """Silence after which the node counts as lost; None: a gateway judges it."""
        return None if self.is_watched else self.pace.silence_limit_ms(monotonic_ms())

    @property
    def is_crowded(self) -> bool:
        """Whether the node is slow to take messages in: bulk has to wait."""
        return self.outbox.messages >= _OUTBOX_MESSAGES // 2

    def close(self) -> None:
        """End the stream after what is queued."""
        self.outbox.end()
