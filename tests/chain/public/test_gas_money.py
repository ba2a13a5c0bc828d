"""A coordinator whose gas money is gone waits with what it owes, and says so."""

import pytest
from msgspec.structs import replace

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from tests.chain.ground import PROFILE, Ground
from tests.signed_receipts import COORDINATOR


def left_with(ground: Ground, wei: int) -> None:
    ground.ask("anvil_setBalance", COORDINATOR.node_id, hex(wei))


@pytest.fixture
def public(ground: Ground) -> Ground:
    """With an open job, on a chain that gives nothing from here on."""
    ledger = ground.opened().settler.contract
    ground.start_with(profile=replace(PROFILE, is_local=False), contract=Address(ledger))
    return ground


def test_what_is_owed_waits_for_gas_money_and_is_paid_once_there_is_some(public: Ground) -> None:
    public.turn()
    left_with(public, 1)
    public.earn(0, [0, 1, 2])
    public.end(0, is_last=True)
    told = public.until(lambda turn: bool(turn.complaints))
    assert "the account cannot pay for it: Insufficient funds" in told.complaints[0]
    for _ in range(PROFILE.depth):
        public.mine()
        assert public.turn().waiting > 0
    left_with(public, 10**18)
    public.settle()
    public.check_exact(3)


def test_a_start_without_gas_money_says_whom_to_send_some(public: Ground) -> None:
    left_with(public, 0)
    with pytest.raises(HyperGPUError) as refused:
        public.turn()
    assert refused.value.reason is Reason.CHAIN_WRONG
    assert COORDINATOR.node_id in refused.value.detail
    assert "send it some of the chain's currency" in refused.value.fix
