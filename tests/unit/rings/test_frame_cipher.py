"""Frames between two stages: what opens where, and who is let into a ring."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hypergpu.crypto import IdentityKey
from hypergpu.ids import JobId
from hypergpu.rings.frame_cipher import (
    FRAME_EXTRA_BYTES,
    FrameCipher,
    FramePlace,
    MicroBatchPlace,
    SealedFrameError,
    generate_ring_secret,
    public_ring_key,
)
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_members import RingMember, members_fault, ring_digest, sign_ring_key

JOB = JobId("j-1")
RING, LATER_RING = b"r" * 32, b"s" * 32
PLACE = FramePlace(7, [(11, 0, 2), (12, 40, 1)])
FORWARD = MicroBatchPlace(7, 2, is_backward=False)
BACKWARD = MicroBatchPlace(7, 2, is_backward=True)
STATES = b"three rows"
IDENTITIES = [IdentityKey(bytes([number]) * 32) for number in (1, 2, 3)]


class Three:
    """Three stages of one ring."""

    def __init__(self) -> None:
        self.stages = [FrameCipher(generate_ring_secret()) for _ in range(3)]
        self.enter(RING)

    def enter(self, ring: bytes) -> None:
        """Form the ring, or another one of the same stages."""
        keys = [None, *(stage.public_key for stage in self.stages), None]
        for place, stage in enumerate(self.stages):
            stage.enter(ring, keys[place], keys[place + 2])


def test_a_frame_opens_at_its_place_and_shows_nothing_on_the_way() -> None:
    ring = Three()
    frame = ring.stages[0].seal(PLACE, STATES)
    assert len(frame) == len(STATES) + FRAME_EXTRA_BYTES
    assert STATES not in frame
    assert ring.stages[1].open(PLACE, frame) == STATES


@pytest.mark.parametrize(
    "place",
    [
        PLACE._replace(number=8),
        PLACE._replace(number=0),
        PLACE._replace(rows=[(11, 1, 2), (12, 40, 1)]),
        PLACE._replace(rows=[(13, 0, 2), (12, 40, 1)]),
        PLACE._replace(rows=[(12, 40, 1), (11, 0, 2)]),
        PLACE._replace(rows=[(11, 0, 3)]),
    ],
)
def test_a_frame_opens_for_no_other_pass_session_or_position(place: FramePlace) -> None:
    ring = Three()
    frame = ring.stages[0].seal(PLACE, STATES)
    with pytest.raises(SealedFrameError, match="not sealed for this pass"):
        ring.stages[1].open(place, frame)
    assert ring.stages[1].open(PLACE, frame) == STATES


def test_a_frame_opens_once_and_none_after_a_later_one() -> None:
    ring = Three()
    first, second = (ring.stages[0].seal(PLACE, STATES) for _ in range(2))
    ring.stages[1].open(PLACE, second)
    for frame in (second, first):
        with pytest.raises(SealedFrameError, match="came before"):
            ring.stages[1].open(PLACE, frame)


def test_a_frame_opens_for_no_other_stage_and_not_for_its_sender() -> None:
    ring = Three()
    frame = ring.stages[0].seal(PLACE, STATES)
    with pytest.raises(SealedFrameError, match="not sealed"):
        ring.stages[2].open(PLACE, frame)
    with pytest.raises(SealedFrameError, match="no stage before"):
        ring.stages[0].open(PLACE, frame)
    with pytest.raises(SealedFrameError, match="no stage behind"):
        ring.stages[2].seal(PLACE, STATES)


def test_activations_go_forward_and_gradients_back_and_neither_shows_anything() -> None:
    ring = Three()
    for sender, receiver, place in ((0, 1, FORWARD), (2, 1, BACKWARD), (1, 0, BACKWARD)):
        frame = ring.stages[sender].seal(place, STATES)
        assert STATES not in frame
        assert ring.stages[receiver].open(place, frame) == STATES


@pytest.mark.parametrize("place", [FORWARD, BACKWARD])
@pytest.mark.parametrize(
    "change", [{"step": 8}, {"step": 0}, {"micro_batch": 3}, {"is_evaluation": True}]
)
def test_a_frame_of_a_training_opens_for_no_other_step_or_micro_batch(
    place: MicroBatchPlace, change: dict[str, Any]
) -> None:
    ring = Three()
    sender, receiver = (2, 1) if place.is_backward else (0, 1)
    frame = ring.stages[sender].seal(place, STATES)
    with pytest.raises(SealedFrameError, match="not sealed for this micro-batch"):
        ring.stages[receiver].open(place._replace(**change), frame)
    assert ring.stages[receiver].open(place, frame) == STATES


def test_a_frame_that_is_reflected_opens_in_no_direction() -> None:
    ring = Three()
    first, second, last = ring.stages
    forward_frame, backward_frame = first.seal(FORWARD, STATES), second.seal(BACKWARD, STATES)
    with pytest.raises(SealedFrameError, match="by the stage behind"):
        first.open(BACKWARD, forward_frame)
    with pytest.raises(SealedFrameError, match="by the stage before"):
        second.open(FORWARD, backward_frame)
    with pytest.raises(SealedFrameError, match="by the stage behind"):
        second.open(BACKWARD, forward_frame)
    with pytest.raises(SealedFrameError, match="no stage behind"):
        last.open(BACKWARD, backward_frame)
    with pytest.raises(SealedFrameError, match="no stage before"):
        first.seal(BACKWARD, STATES)


def test_a_frame_of_a_training_is_none_of_an_answer_and_the_other_way_round() -> None:
    ring = Three()
    frame = ring.stages[0].seal(FORWARD, STATES)
    with pytest.raises(SealedFrameError, match="not sealed for this pass"):
        ring.stages[1].open(PLACE, frame)
    frame = ring.stages[0].seal(PLACE, STATES)
    with pytest.raises(SealedFrameError, match="not sealed for this micro-batch"):
        ring.stages[1].open(FORWARD, frame)


def test_no_nonce_serves_both_directions_of_a_stage() -> None:
    ring = Three()
    frames = [ring.stages[1].seal(place, STATES) for place in (PLACE, FORWARD, BACKWARD) * 2]
    assert len({frame[:8] for frame in frames}) == len(frames)


def test_a_gradient_opens_once_and_none_after_a_later_one() -> None:
    ring = Three()
    first, second = (ring.stages[2].seal(BACKWARD, STATES) for _ in range(2))
    ring.stages[1].open(BACKWARD, second)
    for frame in (second, first):
        with pytest.raises(SealedFrameError, match="came before"):
            ring.stages[1].open(BACKWARD, frame)


def test_a_gradient_of_another_epoch_of_the_same_stages_does_not_open() -> None:
    ring = Three()
    frame = ring.stages[2].seal(BACKWARD, STATES)
    ring.enter(LATER_RING)
    with pytest.raises(SealedFrameError, match="not sealed"):
        ring.stages[1].open(BACKWARD, frame)


def test_a_frame_of_another_ring_of_the_same_stages_does_not_open() -> None:
    ring = Three()
    frame = ring.stages[0].seal(PLACE, STATES)
    ring.enter(LATER_RING)
    with pytest.raises(SealedFrameError, match="not sealed"):
        ring.stages[1].open(PLACE, frame)


def test_no_nonce_is_used_twice_also_where_the_same_ring_forms_again() -> None:
    ring = Three()
    before = ring.stages[0].seal(PLACE, STATES)
    ring.stages[1].open(PLACE, before)
    ring.enter(RING)
    after = ring.stages[0].seal(PLACE, STATES)
    assert after[:8] > before[:8]
    assert after[8:] != before[8:]
    with pytest.raises(SealedFrameError, match="came before"):
        ring.stages[1].open(PLACE, before)
    assert ring.stages[1].open(PLACE, after) == STATES


@given(st.integers(0, len(STATES) + FRAME_EXTRA_BYTES - 1), st.integers(1, 255))
def test_a_frame_that_was_changed_anywhere_does_not_open(index: int, change: int) -> None:
    ring = Three()
    frame = bytearray(ring.stages[0].seal(PLACE, STATES))
    frame[index] ^= change
    with pytest.raises(SealedFrameError):
        ring.stages[1].open(PLACE, bytes(frame))


@given(st.binary(max_size=64))
def test_what_is_no_frame_does_not_open(frame: bytes) -> None:
    with pytest.raises(SealedFrameError):
        Three().stages[1].open(PLACE, frame)


def test_a_key_that_shares_no_secret_is_refused() -> None:
    with pytest.raises(SealedFrameError, match="shares no secret"):
        FrameCipher(generate_ring_secret()).enter(RING, bytes(32), None)


def member(place: int, span: LayerSpan, *, lease: int = 5) -> RingMember:
    identity, key = IDENTITIES[place], public_ring_key(bytes([place + 9]) * 32)
    signature = sign_ring_key(identity, JOB, lease, key)
    return RingMember(identity.node_id, lease, span, key, signature)


MEMBERS = (member(0, LayerSpan(0, 2)), member(1, LayerSpan(2, 3)), member(2, LayerSpan(3, 6)))


def test_nodes_that_signed_their_keys_and_hold_each_layer_once_are_a_ring() -> None:
    assert not members_fault(JOB, 6, MEMBERS)


@pytest.mark.parametrize(
    ("members", "fault"),
    [
        ((), "1 to 64 stages"),
        (MEMBERS[:2], "every layer once"),
        ((MEMBERS[1], MEMBERS[0], MEMBERS[2]), "in the order of their layers"),
        ((*MEMBERS[:2], member(2, LayerSpan(2, 6))), "every layer once"),
        ((*MEMBERS[:2], member(1, LayerSpan(3, 6))), "twice"),
        ((*MEMBERS[:2], replace(MEMBERS[2], key=MEMBERS[0].key)), "has not signed"),
        ((*MEMBERS[:2], replace(MEMBERS[2], lease=6)), "has not signed"),
        ((*MEMBERS[:2], replace(MEMBERS[2], lease=-1)), "has not signed"),
        ((*MEMBERS[:2], replace(MEMBERS[2], key=b"short")), "5 bytes"),
        ((*MEMBERS[:2], replace(MEMBERS[2], signature=b"")), "has not signed"),
        ((replace(MEMBERS[0], node=IDENTITIES[2].node_id), *MEMBERS[1:2]), "every layer once"),
    ],
)
def test_others_are_no_ring_with_the_reason(members: tuple[RingMember, ...], fault: str) -> None:
    assert fault in members_fault(JOB, 6, members)


def test_a_key_that_was_signed_for_another_job_is_nobodys() -> None:
    assert "has not signed" in members_fault(JobId("j-2"), 6, MEMBERS)


def test_another_epoch_or_another_member_is_another_ring() -> None:
    digests = {
        ring_digest(JOB, 1, MEMBERS),
        ring_digest(JOB, 2, MEMBERS),
        ring_digest(JobId("j-2"), 1, MEMBERS),
        ring_digest(JOB, 1, (*MEMBERS[:2], member(2, LayerSpan(3, 6), lease=6))),
    }
    assert len(digests) == 4
