"""How the demo's contributions reach the chain, and what is refused."""

from pathlib import Path

import pytest

from hypergpu.cli.demo.job import EACH, METERINGS, TRANSACTIONS_AN_EPOCH, plan
from hypergpu.cli.demo.metered import Recorded, recorded
from hypergpu.cli.demo.settlement import chain_here
from hypergpu.cli.ledger.account import LedgerView, TransactionView
from hypergpu.cluster.coordinator import Listen, SettlingBy, coordinator_command
from hypergpu.errors import HyperGPUError
from hypergpu.ids import Address
from hypergpu.sites import Site, Sites


@pytest.mark.parametrize("nodes", [2, 5, 32])
@pytest.mark.parametrize("worker", ["torch", "numpy"])
@pytest.mark.parametrize("is_short", [True, False])
def test_one_epoch_has_room_for_half_as_many_again_as_are_promised(
    nodes: int, worker: str, *, is_short: bool
) -> None:
    usual = plan(nodes, is_short=is_short, worker=worker).spec
    spec = plan(nodes, is_short=is_short, worker=worker, metering=EACH).spec
    training = spec.training
    assert training.rounds * nodes >= 1.5 * TRANSACTIONS_AN_EPOCH
    # As planned rounds are of other sizes than this, there may be as many as there are steps.
    assert spec.pay.rounds_per_epoch >= training.rounds * training.inner_steps
    assert training.rounds >= usual.training.rounds
    steps = usual.training.rounds * usual.training.inner_steps
    assert steps <= training.rounds * training.inner_steps < steps + training.rounds
    assert usual.pay.rounds_per_epoch == 3


def row(purpose: str, epoch: int, state: str = "final") -> TransactionView:
    return TransactionView(hash="0x" + "0" * 64, purpose=purpose, epoch=epoch, state=state, block=1)


def view(*transactions: TransactionView) -> LedgerView:
    return LedgerView(
        job="job-1",
        key="",
        coordinator=Address("0x" + "1" * 40),
        chain_id=31337,
        contract=Address("0x" + "2" * 40),
        unit_price="1",
        escrow="1",
        spent="0",
        is_over=True,
        unmeasured_rounds=0,
        nodes=[],
        transactions=list(transactions),
        chain=None,
    )


def test_transactions_that_record_contributions_are_counted_by_epoch() -> None:
    found = recorded(
        view(
            row("open/job-1", 0),
            *[row(f"batch/job-1/{number}", 0, "mined") for number in range(3)],
            *[row(f"batch/job-1/{number}", 1) for number in (3, 4)],
            row("batch/job-1/5", 1, "abandoned"),
            row("close/job-1/1", 1),
        )
    )
    assert found == Recorded(5, 2)
    assert recorded(view()) == Recorded(0, 0)


def test_the_coordinator_is_told_how_to_meter() -> None:
    at = Listen(data_dir=Path("data"), settling=SettlingBy("anvil", "each"))
    assert coordinator_command(at)[-4:] == ["--chain", "anvil", "--metering", "each"]


def test_a_metering_that_there_is_not_is_refused() -> None:
    with pytest.raises(HyperGPUError, match="--metering all: there is none") as refused:
        chain_here(None, "all")
    assert refused.value.fix == "choose one of batched, packed, each"


@pytest.mark.parametrize("metering", METERINGS)
def test_what_needs_a_chain_is_refused_where_there_is_none(metering: str) -> None:
    elsewhere = Sites(backend="tunnel", coordinator=Site(dials="10.0.0.1"), nodes={})
    if metering == "batched":
        chain = chain_here(elsewhere, metering)
        assert chain.settling == SettlingBy()
        assert chain.note.endswith("in a network of its own: receipts without a chain")
        return
    with pytest.raises(HyperGPUError, match=f"--metering {metering} needs a chain") as refused:
        chain_here(elsewhere, metering)
    assert "the coordinator is in a network of its own" in refused.value.fix
