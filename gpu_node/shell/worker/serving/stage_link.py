"""A stage's place in its ring: checks who the others are, opens what comes and seals what goes.

The coordinator says who is in the ring. What it cannot do is speak for a node: each member's key is
signed by that node's identity, and a stage takes part with nobody whose signature is wrong.
"""

from collections.abc import Callable

from msgspec.structs import replace

from gpu_node.shell.worker.protocol import RingKey
from hypergpu.ids import JobId, NodeId
from hypergpu.rings.frame_cipher import FrameCipher, FramePlace, SealedFrameError
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_members import (
    RingMember,
    check_digest,
    key_fault,
    members_fault,
    ring_digest,
)
from hypergpu.serving.check_messages import HandStates, TakeStates
from hypergpu.serving.stage_messages import (
    ComputePass,
    JoinRing,
    StageRefused,
    StageReply,
    StageRows,
)
from hypergpu.serving.training_messages import (
    Activations,
    Gradients,
    TrainBackward,
    TrainForward,
    TrainingRequest,
)


class StageLink:
    """One stage under one lease.

    Args:
        job_id: The served model's.
        lease: The stage's.
        span: Its layers.
        layers: Of the whole model.
        ring_key: Of no other link.
    """

    def __init__(
        self, job_id: JobId, lease: int, span: LayerSpan, layers: int, ring_key: RingKey
    ) -> None:
        self._job_id = job_id
        self._lease = lease
        self._span = span
        self._layers = layers
        self._cipher = FrameCipher(ring_key.secret)
        self.members: tuple[RingMember, ...] = ()
        """All stages of the ring that it is in."""
        self._node: NodeId | None = None

    @property
    def public_key(self) -> bytes:
        """Its public key."""
        return self._cipher.public_key

    def join(self, request: JoinRing) -> str:
        """Take the place in a ring; gives why it does not, or nothing."""
        members = request.members
        if fault := members_fault(self._job_id, self._layers, members):
            return fault
        place = request.place
        own = members[place] if 0 <= place < len(members) else None
        if own is None or (own.key, own.lease, own.span) != (
            self.public_key,
            self._lease,
            self._span,
        ):
            return f"this stage is not at place {place} of the ring with its own key"
        before = members[place - 1].key if place else None
        after = members[place + 1].key if place + 1 < len(members) else None
        try:
            self._cipher.enter(ring_digest(self._job_id, request.epoch, members), before, after)
        except SealedFrameError as error:
            return str(error)
        self.members = members
        self._node = own.node
        return ""

    def open_states(self, request: ComputePass) -> ComputePass:
        """Open a pass: the states in it that the stage before has sealed.

        Raises:
            SealedFrameError: They are not for this pass.
        """
        if not request.states:
            return request
        return replace(request, states=self._cipher.open(request.place, request.states))

    def seal_states(self, place: FramePlace, rows: StageRows) -> StageRows:
        """Seal states for the stage behind; none stay none.

        Raises:
            SealedFrameError: There is no stage behind.
        """
        return StageRows(self._cipher.seal(place, rows.states)) if rows.states else rows

    def perform(
        self, request: TrainingRequest, perform: Callable[[TrainingRequest], StageReply]
    ) -> StageReply:
        """Have a stage do what its training asks, on what the stages beside it have sealed for it,
        and seal what it gives for them.
        """
        if not isinstance(request, TrainForward | TrainBackward):
            return perform(request)
        try:
            opened_request = self._open(request)
        except SealedFrameError as error:
            side = "behind" if isinstance(request, TrainBackward) else "before"
            return StageRefused(f"what came from the stage {side}: {error}", blames_input=True)
        try:
            return self._seal(request, perform(opened_request))
        except SealedFrameError as error:
            return StageRefused(str(error), is_lasting=False)

    def _open(self, request: TrainForward | TrainBackward) -> TrainForward | TrainBackward:
        if isinstance(request, TrainBackward):
            rows = self._cipher.open(request.backward_place, request.states)
        elif request.states:
            rows = self._cipher.open(request.forward_place, request.states)
        else:
            return request
        return replace(request, states=rows)

    def _seal(self, request: TrainForward | TrainBackward, reply: StageReply) -> StageReply:
        if isinstance(reply, Activations) and isinstance(request, TrainForward):
            return Activations(self._cipher.seal(request.forward_place, reply.states))
        if isinstance(reply, Gradients) and reply.states:
            return replace(reply, states=self._cipher.seal(request.backward_place, reply.states))
        return reply

    def seal_for_checker(self, request: HandStates, rows: StageRows) -> StageRows:
        """Seal states that were sent for a node that computes them again; none stay none.

        Raises:
            SealedFrameError: The checker has not signed its key, or this stage is in no ring.
        """
        own = next((each for each in self.members if each.node == self._node), None)
        if own is None:
            raise SealedFrameError("this stage is in no ring that it knows")
        if fault := key_fault(self._job_id, request.checker):
            raise SealedFrameError(fault)
        if not rows.states:
            return rows
        context = check_digest(self._job_id, request.check, own, request.checker)
        key, place = request.checker.key, request.place
        return StageRows(self._cipher.seal_to(context, key, place, rows.states))

    def open_for_check(self, request: TakeStates) -> bytes:
        """States that a stage has sealed for this node, which computes them again.

        Raises:
            SealedFrameError: They are not sealed for it by the stage that is told.
        """
        if fault := key_fault(self._job_id, request.sender):
            raise SealedFrameError(fault)
        # What the sender was told of another key opens by that one alone.
        context = check_digest(self._job_id, request.check, request.sender, request.checker)
        return self._cipher.open_from(context, request.sender.key, request.place, request.states)
