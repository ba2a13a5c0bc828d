"""A stage's place in its ring: what it is told of the others, and what it takes from them."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from gpu_node.shell.worker.protocol import RingKey
from gpu_node.shell.worker.serving.stage_link import StageLink
from hypergpu.crypto import IdentityKey
from hypergpu.ids import JobId
from hypergpu.rings.frame_cipher import SealedFrameError, generate_ring_secret
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_members import RingMember, sign_ring_key
from hypergpu.serving.check_messages import HandStates, TakeStates
from hypergpu.serving.stage_messages import (
    ComputePass,
    JoinRing,
    ReplayRows,
    StageRefused,
    StageReply,
    StageRows,
    StageSegment,
)
from hypergpu.serving.training_messages import (
    Activations,
    Gradients,
    TrainBackward,
    TrainForward,
    TrainingRequest,
)

JOB = JobId("j-1")
SPANS = (LayerSpan(0, 2), LayerSpan(2, 3), LayerSpan(3, 4))
LAYERS, LEASE = 4, 7
REQUEST = ComputePass(segments=(StageSegment(5, 0, 2),), states=b"-", number=3)


class Members:
    """Three nodes with a stage each."""

    def __init__(self) -> None:
        self.identities = [IdentityKey(bytes([number]) * 32) for number in (1, 2, 3)]
        self.links, members = [], []
        for identity, span in zip(self.identities, SPANS, strict=True):
            link = StageLink(JOB, LEASE, span, LAYERS, RingKey(generate_ring_secret(), b""))
            signature = sign_ring_key(identity, JOB, LEASE, link.public_key)
            members.append(RingMember(identity.node_id, LEASE, span, link.public_key, signature))
            self.links.append(link)
        self.told = tuple(members)

    def join(self, epoch: int = 1) -> None:
        """Tell each who the others are."""
        for place, link in enumerate(self.links):
            assert not link.join(JoinRing(epoch, place, self.told))


def test_states_pass_from_stage_to_stage_and_again_where_one_was_lost() -> None:
    ring = Members()
    ring.join()
    first, second, _ = ring.links
    rows = first.seal_states(REQUEST.place, StageRows(b"states"))
    assert second.open_states(replace(REQUEST, states=rows.states)).states == b"states"
    repair_request = replace(REQUEST, number=0)
    rows = first.seal_states(ReplayRows(5, 0, 2).place, StageRows(b"states"))
    assert second.open_states(replace(repair_request, states=rows.states)).states == b"states"
    assert first.seal_states(REQUEST.place, StageRows()) == StageRows()


def test_stages_that_were_told_different_members_understand_nothing_of_each_other() -> None:
    ring = Members()
    ring.join()
    first, second, _ = ring.links
    other = IdentityKey(b"4" * 32)
    key = ring.told[2].key
    other_member = RingMember(other.node_id, 9, SPANS[2], key, sign_ring_key(other, JOB, 9, key))
    assert not second.join(JoinRing(1, 1, (*ring.told[:2], other_member)))
    rows = first.seal_states(REQUEST.place, StageRows(b"states"))
    with pytest.raises(SealedFrameError, match="not sealed"):
        second.open_states(replace(REQUEST, states=rows.states))


def test_a_training_goes_around_sealed_and_a_frame_that_does_not_open_blames_its_sender() -> None:
    ring = Members()
    ring.join()
    first, second, last = ring.links
    forward = TrainForward(micro_batch=1, lengths=(2,), tokens=(5, 6), step=3)
    activations = first.perform(forward, lambda _: Activations(b"states"))
    assert isinstance(activations, Activations)
    assert b"states" not in activations.states
    request = replace(forward, tokens=(), states=activations.states)
    requests: list[TrainingRequest] = []
    gradients = last.perform(
        replace(forward, tokens=(), states=second.perform(request, note(requests)).states),  # type: ignore[union-attr]
        lambda _: Gradients(states=b"gradients", loss=2.0),
    )
    assert isinstance(gradients, Gradients)
    assert gradients.loss == 2.0
    backward = TrainBackward(micro_batch=1, states=gradients.states, step=3)
    second.perform(backward, note(requests))
    assert [each.states for each in requests] == [b"states", b"gradients"]  # type: ignore[union-attr]
    for wrong_request, side in ((request, "before"), (backward, "behind")):
        reply = second.perform(wrong_request, note(requests))
        assert isinstance(reply, StageRefused)
        assert reply.blames_input
        assert reply.reason.startswith(f"what came from the stage {side}: frame")
    assert len(requests) == 2


def note(requests: list[TrainingRequest]) -> Callable[[TrainingRequest], StageReply]:
    """Notes what a stage computes on."""

    def perform(request: TrainingRequest) -> StageReply:
        requests.append(request)
        return Activations(b"more states")

    return perform


@pytest.mark.parametrize(
    ("place", "change", "reason"),
    [
        (0, {}, "not at place 0"),
        (3, {}, "not at place 3"),
        (-1, {}, "not at place -1"),
        (1, {"signature": bytes(65)}, "has not signed"),
        (1, {"span": LayerSpan(2, 4)}, "order of their layers|every layer once"),
    ],
)
def test_a_stage_is_in_no_ring_that_it_is_told_wrongly_of(
    place: int, change: dict[str, object], reason: str
) -> None:
    ring = Members()
    members = (ring.told[0], replace(ring.told[1], **change), ring.told[2])
    fault = ring.links[1].join(JoinRing(1, place, members))
    assert any(each in fault for each in reason.split("|"))
    with pytest.raises(SealedFrameError, match="in a ring that it knows"):
        ring.links[1].open_states(REQUEST)


def test_states_for_a_checker_open_there_alone() -> None:
    ring = Members()
    ring.join()
    first, second, _ = ring.links
    checkers = []
    for seed in (b"5", b"6"):
        identity = IdentityKey(seed * 32)
        link = StageLink(JOB, LEASE, SPANS[1], LAYERS, RingKey(generate_ring_secret(), b""))
        signature = sign_ring_key(identity, JOB, LEASE, link.public_key)
        checkers.append(
            (link, RingMember(identity.node_id, LEASE, SPANS[1], link.public_key, signature))
        )
    (checker, member), (other, other_member) = checkers
    request = HandStates(4, 5, 0, 2, member)
    rows = first.seal_for_checker(request, StageRows(b"states"))
    assert b"states" not in rows.states
    take = TakeStates(
        check=4,
        session=5,
        start=0,
        count=2,
        sender=ring.told[0],
        checker=member,
        is_output=False,
        states=rows.states,
    )
    wrong = (
        replace(take, check=3),
        replace(take, start=1),
        replace(take, sender=ring.told[1]),
        replace(take, checker=other_member),
        replace(take, states=rows.states[:-1]),
    )
    for each in wrong:
        with pytest.raises(SealedFrameError, match="not sealed"):
            checker.open_for_check(each)
    for link in (other, second):
        with pytest.raises(SealedFrameError, match="not sealed"):
            link.open_for_check(take)
    assert checker.open_for_check(take) == b"states"
    with pytest.raises(SealedFrameError, match="came before"):
        checker.open_for_check(take)
    assert first.seal_for_checker(request, StageRows()) == StageRows()


def test_states_go_to_no_checker_whose_node_has_not_signed_its_key() -> None:
    ring = Members()
    first = ring.links[0]
    member = replace(ring.told[2], signature=bytes(65))
    request = HandStates(4, 5, 0, 2, member)
    with pytest.raises(SealedFrameError, match="in no ring"):
        first.seal_for_checker(request, StageRows(b"states"))
    ring.join()
    with pytest.raises(SealedFrameError, match="has not signed"):
        first.seal_for_checker(request, StageRows(b"states"))
