"""Counts of tokens become money on the contract, each once."""

from pathlib import Path

import pytest

from benchmarks.ours.metering.host import ENDED
from hypergpu.journal.worth import worth
from hypergpu.units import Wei
from payments.cli.account import open_ledger
from payments.cli.records import read_records
from payments.core.verify import ReceiptFile, verify
from payments.shell.anvil import Anvil
from tests.chain.world import OnChainPayments, open_payments_on_chain
from tests.serve_plan import CountedTokens, ServePlan

PRICE = 700_001


def accept(world: OnChainPayments, *counts: tuple[int, int, int]) -> None:
    """Journal accepted counts: the place of the node, the count's number and its units."""
    plan = world.plan
    assert isinstance(plan, ServePlan)
    rows = [
        plan.window_row(world.terms, CountedTokens(plan.keys[place], number, units))
        for place, number, units in counts
    ]
    world.host.append(plan.job_id, rows)


@pytest.mark.parametrize("metering", ["batched", "each"])
async def test_counts_are_paid_once_whatever_the_order_of_signatures(
    metering: str, tmp_path: Path, anvil: Anvil
) -> None:
    plan = ServePlan(nodes=2, rounds_per_epoch=2, unit_price=PRICE)
    async with open_payments_on_chain(tmp_path, anvil, plan, metering=metering) as world:
        accept(world, (0, 2, 10_000), (1, 3, 9_999))
        accept(world, (0, 1, 7))
        await world.settle_rows()
        await world.restart()
        accept(world, (1, 4, 1))
        world.host.append(plan.job_id, [ENDED])
        await world.settle()
        balances = await world.balances()
        assert list(balances.values()) == [worth(PRICE, each * 10_000) for each in (10_007, 10_000)]
        async with open_ledger(world.terms.domain, anvil.url) as ledger:
            records = await read_records(ledger, world.terms)
        receipts = [
            receipt
            for key in plan.keys
            for receipt in world.payments._store.receipts(plan.job_id, key.node_id)
        ]
        findings = verify(
            ReceiptFile(plan.job_id, world.terms, Wei(PRICE), tuple(receipts)), records
        )
        assert (findings.faults, findings.open) == ((), ())
