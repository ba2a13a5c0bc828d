"""Results of farm jobs become money on the contract, in every unit, each result once."""

from pathlib import Path

import pytest

from benchmarks.ours.metering.host import ENDED
from hypergpu.journal.worth import worth
from hypergpu.units import Wei
from hypergpu.work_units import WorkUnit
from payments.cli.account import open_ledger
from payments.cli.records import read_records
from payments.core.verify import ReceiptFile, verify
from payments.shell.anvil import Anvil
from tests.chain.world import OnChainPayments, open_payments_on_chain
from tests.farm_plan import FARM_UNITS, FarmPlan, LeasedResult

PRICE = 1_300_007


def accept(world: OnChainPayments, bundle: int, *results: tuple[int, int, int]) -> None:
    """Journal an accepted bundle: places of its nodes, leases and units."""
    plan = world.plan
    assert isinstance(plan, FarmPlan)
    leased_results = [
        LeasedResult(plan.keys[place], lease, units) for place, lease, units in results
    ]
    world.host.append(plan.job_id, [plan.bundle_row(bundle, world.terms, leased_results)])


@pytest.mark.parametrize("unit", FARM_UNITS)
@pytest.mark.parametrize("metering", ["batched", "each"])
async def test_results_of_every_unit_are_paid_once_whatever_the_order_of_leases(
    unit: WorkUnit, metering: str, tmp_path: Path, anvil: Anvil
) -> None:
    plan = FarmPlan(nodes=3, rounds_per_epoch=2, unit_price=PRICE, counted_in=unit)
    async with open_payments_on_chain(tmp_path, anvil, plan, metering=metering) as world:
        accept(world, 1, (0, 7, 1_000), (1, 9, 1_000))
        accept(world, 0, (0, 2, 333))
        await world.settle_rows()
        accept(world, 2, (0, 1, 50))
        await world.restart()
        accept(world, 3, (2, 11, 1))
        world.host.append(plan.job_id, [ENDED])
        await world.settle()
        units = [1_383, 1_000, 1]
        balances = await world.balances()
        assert list(balances.values()) == [worth(PRICE, each * 10_000) for each in units]
        async with open_ledger(world.terms.domain, anvil.url) as ledger:
            records = await read_records(ledger, world.terms)
        receipts = [
            receipt
            for key in plan.keys
            for receipt in world.payments._store.receipts(plan.job_id, key.node_id)
        ]
        file = ReceiptFile(plan.job_id, world.terms, Wei(PRICE), tuple(receipts))
        findings = verify(file, records)
        assert (findings.faults, findings.open) == ((), ())
        assert sum(finding.paid for finding in findings.nodes) == sum(balances.values())
