"""An operator whose settling stopped at a failed transaction starts once with --retry-failed."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.config import Settings
from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.chain.pipeline import PipelineState
from coordinator.shell.metering.settling import Settling
from tests.chain.ground import PROFILE, TURNS_MOST, WITHIN_S, Ground
from tests.signed_receipts import COORDINATOR

LATER = [TransactionState.WAITING, TransactionState.MINED, TransactionState.FAILED]


def turned(settling: Settling) -> PipelineState:
    """What it says after its next turn, or has said since it stopped."""
    before = settling.state
    settling.wake()
    while (now := settling.state) is before and not now.halted:
        os.sched_yield()
    return now


def started(ground: Ground, *, retry_failed: bool) -> str:
    """Start a coordinator's settling on the chain, until all is final or it stops; says why."""
    ground.crash()
    settings = Settings(
        data_dir=ground.folder, chain="anvil", chain_url=ground.url, retry_failed=retry_failed
    )
    settling = Settling(settings, COORDINATOR, ground.journal)
    settling.start(least_s=WITHIN_S)
    try:
        for _ in range(TURNS_MOST):
            state = turned(settling)
            if state.halted or not ground.journal.transactions(
                settling.account, states=LATER, limit=1
            ):
                return state.halted
            ground.mine()
    finally:
        settling.stop()
    raise AssertionError(f"neither settled nor stopped: {settling.state}")


def test_what_failed_is_settled_once_after_a_start_that_retries_it(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    ground.opened()
    ground.options = replace(ground.options, profile=replace(PROFILE, gas_percent=40))
    ground.crash()
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    ground.turn()
    ground.options = replace(ground.options, profile=PROFILE)

    halted = started(ground, retry_failed=False)
    assert halted.startswith("transaction ")
    assert "it failed in block" in halted
    assert "It failed since it ran out of gas: it used 131200 of 131200. Fix: start once" in halted
    assert "hypergpu up --retry-failed" in halted
    assert started(ground, retry_failed=False) == halted

    assert started(ground, retry_failed=True) == ""
    ground.settle()
    ground.check_exact(2)
    assert started(ground, retry_failed=True) == ""
    ground.check_exact(2)
