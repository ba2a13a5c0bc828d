"""How calls reach a replica: a node on its control stream, or a ring of several nodes."""

from typing import NamedTuple, Protocol

from coordinator.shell.nodes.control_stream import ControlStream
from hypergpu.ids import JobId
from hypergpu.serving.calls import ModelCall, pack_call
from hypergpu.serving.tuned_model import VersionOffer
from hypergpu.v1 import node_pb2, work_pb2
from hypergpu.wire.messages import blob_message


class ReplicaLink(Protocol):
    """The way to one replica."""

    def send(self, number: int, call: ModelCall) -> None:
        """Have it answer a call."""
        ...

    def send_body(self, number: int, body: bytes) -> None:
        """Send it a call that is packed already."""
        ...

    def send_offer(self, number: int, offer: VersionOffer) -> None:
        """Offer it a version of the training that its model follows."""
        ...

    def cancel(self, number: int) -> None:
        """Have it answer a call no more."""
        ...

    def is_on(self, stream: ControlStream) -> bool:
        """Whether it is reached by this stream."""
        ...


class StreamLink(NamedTuple):
    """A node that holds the whole model."""

    stream: ControlStream
    job_id: JobId
    lease: int

    def send(self, number: int, call: ModelCall) -> None:
        """See `ReplicaLink.send`."""
        self.send_body(number, pack_call(call))

    def send_body(self, number: int, body: bytes) -> None:
        """See `ReplicaLink.send_body`."""
        self._say(work_pb2.WorkCall(call=number, body=body))

    def send_offer(self, number: int, offer: VersionOffer) -> None:
        """See `ReplicaLink.send_offer`: the node fetches the blob that it names."""
        body = pack_call(ModelCall(offer=offer))
        self._say(work_pb2.WorkCall(call=number, body=body, inputs=[blob_message(offer.blob)]))

    def is_on(self, stream: ControlStream) -> bool:
        """See `ReplicaLink.is_on`."""
        return self.stream is stream

    def cancel(self, number: int) -> None:
        """See `ReplicaLink.cancel`."""
        self._say(work_pb2.WorkCall(call=number, is_cancelled=True))

    def _say(self, message: work_pb2.WorkCall) -> None:
        message.job_id, message.lease = self.job_id, self.lease
        self.stream.send(node_pb2.ControlResponse(work_call=message))
