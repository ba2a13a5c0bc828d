from pathlib import Path

import pytest

from benchmarks.ours.metering.faults import Faults, run_through
from benchmarks.ours.metering.plan import Plan
from hypergpu.chain.local.anvil import AnvilOptions, running_anvil


@pytest.mark.timeout(600)
def test_five_thousand_receipts_through_kills_and_reorganisations_are_paid_exactly_once(
    tmp_path: Path,
) -> None:
    with running_anvil(AnvilOptions(), log=tmp_path / "anvil.log") as anvil:
        plan = Plan(
            folder=str(tmp_path),
            url=anvil.url,
            nodes=10,
            receipts_each=500,
            rounds_per_epoch=100,
            round_ms=20,
        )
        outcome = run_through(plan, anvil, Faults(kills=8, reorganisations=6, seed=5))
    assert outcome.errors == ()
