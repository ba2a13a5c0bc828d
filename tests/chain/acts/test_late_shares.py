"""A receipt that came too late for its own epoch is paid with a later one, and claimed there."""

import pytest

from tests.chain.acts.hands import EACH, NODE, Hands, told
from tests.chain.ground import JOB
from tests.signed_receipts import COORDINATOR, Work, node_key, receipt_record

OTHER = node_key(55)


@pytest.mark.parametrize("later", [1, 3])
def test_a_share_of_a_later_epoch_than_its_receipts_own_is_closed_and_claimed(
    hands: Hands, later: int
) -> None:
    ground, site = hands.ground, hands.ground.settler.site
    signed = receipt_record(JOB, Work(node=NODE, sequence=0), domain=hands.domain).signed
    hands.hold(signed)
    # The coordinator closes epochs without it, and anybody forces it into the next.
    for epoch in range(later):
        ground.act_as(COORDINATOR, site.calls.close(site.job_key(JOB), epoch).call)
    ground.act_as(OTHER, site.calls.record_one(signed, later).call)

    waiting = told(hands.as_node("claim", "--json"))
    assert waiting["said"].startswith(f"epoch {later} is open: if its coordinator does not close")
    ground.let_pass(waiting["ready_at_s"] - ground.chain.head().time_s)
    ground.mine()
    closing = told(hands.as_node("claim", "--json"))
    assert f"epoch {later}, which its coordinator had left open, was closed" in closing["said"]
    hands.pass_time()
    assert told(hands.as_node("claim", "--json"))["amounts"]["shares"] == str(EACH)
    assert hands.has() == EACH
