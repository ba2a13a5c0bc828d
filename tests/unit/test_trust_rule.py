"""The rule that weighs updates: what nobody is paid for."""

from collections.abc import Sequence

import pytest

from coordinator.core.training.job.trust_memory import TrustMemory, Weighing
from coordinator.core.training.trust.weights import (
    LENGTH_MOST,
    WHOLE,
    UpdateEvidence,
    weigh_updates,
)
from hypergpu.ids import NodeId

NODES = [NodeId(f"{number:032x}") for number in range(10)]
LAST = NODES[-1]


def evidence(
    node: NodeId, *, norm: float = 1.0, influence: float = 0.5, group: int = 0
) -> UpdateEvidence:
    """Measures of an update; the gain is that of a gradient of length 1."""
    return UpdateEvidence(
        node=node,
        inner_steps=20,
        norm=norm,
        statistics_norm=0.0,
        influence=influence,
        gain=influence * norm,
        group=group,
    )


def round_with(last: UpdateEvidence) -> list[UpdateEvidence]:
    """Nine updates that are alike in worth, and a tenth."""
    return [*(evidence(node) for node in NODES[:-1]), last]


def weigh_all(rounds: Sequence[Sequence[UpdateEvidence]]) -> Weighing:
    """The weighing of the last of several rounds."""
    memory = TrustMemory()
    for each in rounds[:-1]:
        memory = weigh_updates(memory, each).memory
    return weigh_updates(memory, rounds[-1])


@pytest.mark.parametrize("times", [LENGTH_MOST * 1.1, 10.0, 1e6])
def test_an_update_far_longer_than_the_others_has_no_vote(times: float) -> None:
    weighing = weigh_updates(TrustMemory(), round_with(evidence(LAST, norm=times)))
    assert weighing.votes == {LAST: 0}
    assert "times as long" in weighing.reasons[LAST]


def test_a_longer_update_is_clipped_and_keeps_its_vote() -> None:
    weighing = weigh_updates(TrustMemory(), round_with(evidence(LAST, norm=2.0)))
    assert weighing.votes == {}
    assert weighing.clips == {LAST: WHOLE // 2}


def test_copies_have_less_than_one_vote_together() -> None:
    copied_evidence = [evidence(node, group=1) for node in NODES[:4]]
    weighing = weigh_updates(TrustMemory(), [*copied_evidence, *map(evidence, NODES[4:])])
    assert sum(weighing.votes[node] for node in NODES[:4]) == WHOLE // 4


def test_who_was_found_out_does_not_come_back_by_waiting() -> None:
    loud = round_with(evidence(LAST, influence=-0.5))
    silent = [
        evidence(each.node, norm=1e-6, influence=0.5 if each.node != LAST else 0.0) for each in loud
    ]
    assert weigh_all([loud] * 5).votes == {LAST: 0}
    assert weigh_all([loud] * 5 + [silent] * 50).votes[LAST] < WHOLE // 50


def test_who_helps_again_comes_back() -> None:
    bad, good = round_with(evidence(LAST, influence=-0.5)), round_with(evidence(LAST))
    assert weigh_all([bad] * 5 + [good] * 10).votes == {}
