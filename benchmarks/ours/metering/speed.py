"""Receipts a second: from signed contributions to blocks, and with a transaction for each."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

from coincurve import PrivateKey, PublicKey

from benchmarks.ours.metering.faults import SettledChain
from benchmarks.ours.metering.host import JobPlan
from benchmarks.ours.metering.running import RunningPayments, SettlementRun, run_payments
from hypergpu.keys.keccak import keccak
from hypergpu.statements.contribution import is_signed_by
from hypergpu.statements.domain import Terms, separator_of
from payments.core.facts import MeasuredFact
from payments.shell.anvil import AnvilOptions, running_anvil

Round = tuple[str, MeasuredFact]
_AT_ONCE = 100
"""Rounds that are ready at once, and are written in one go."""
_SIGNATURES = 4_000
_LOOK_S = 0.02


def signatures_per_s() -> float:
    """How often libsecp256k1 recovers one signer and signs once, on every core at a time."""
    key, digest = PrivateKey(keccak(b"a limit's key")), keccak(b"a receipt")
    made = key.sign_recoverable(digest, hasher=None)

    def on_one_core(times: int) -> None:
        for _ in range(times):
            PublicKey.from_signature_and_message(made, digest, hasher=None)
            key.sign_recoverable(digest, hasher=None)

    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        begun_s = time.monotonic()
        list(pool.map(on_one_core, [_SIGNATURES] * cores))
        return _SIGNATURES * cores / (time.monotonic() - begun_s)


def receipts_per_s(plan: SettlementRun) -> float:
    """Verify, journal, fold, sign, keep and send: until the last receipt is in a block."""
    return asyncio.run(_measure(plan))


def receipts_on_anvil_per_s(folder: Path, rounds: int, metering: str) -> float:
    """Receipts a second of one epoch that does not end, on a chain of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    with running_anvil(AnvilOptions(), log_file=folder / "anvil.log") as anvil:
        plan = SettlementRun(
            folder=str(folder),
            url=anvil.url,
            job=JobPlan(rounds=rounds, rounds_per_epoch=rounds + 1),
            metering="each" if metering == "each" else "batched",
        )
        return receipts_per_s(plan)


async def _measure(plan: SettlementRun) -> float:
    async with run_payments(plan) as here:
        rounds = [plan.job.round_row(number, here.terms) for number in range(plan.job.rounds)]
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(here.payments.wake)

        begun_s = time.monotonic()
        await asyncio.to_thread(_take_in, plan, rounds, here, wake)
        await asyncio.to_thread(_wait_until_counted, plan)
        return plan.receipts / (time.monotonic() - begun_s)


def _take_in(
    plan: SettlementRun, rounds: Sequence[Round], here: RunningPayments, wake: Callable[[], None]
) -> None:
    """Verify in one thread and journal in another, as a coordinator does."""
    verified: Queue[Sequence[Round]] = Queue(1)
    with ThreadPoolExecutor(1) as verifier:
        verifying = verifier.submit(_verify, rounds, here.terms, verified)
        for _ in range(0, len(rounds), _AT_ONCE):
            here.host.append(plan.job.job_id, verified.get())
            wake()
        verifying.result()
    here.end(plan)
    wake()


def _verify(rounds: Sequence[Round], terms: Terms, verified: "Queue[Sequence[Round]]") -> None:
    separator = separator_of(terms.domain)
    for first in range(0, len(rounds), _AT_ONCE):
        ready = rounds[first : first + _AT_ONCE]
        for work in (work for _, measured in ready for work in measured.updates):
            made = work.contribution
            if not is_signed_by(made.node, separator, made, work.signature):
                raise RuntimeError("a contribution's signature is wrong")
        verified.put(ready)


def _wait_until_counted(plan: SettlementRun) -> None:
    chain = SettledChain(plan.url)
    nodes = [chain.web3.to_checksum_address(key.address) for key in plan.job.keys]
    account = chain.ledger.functions.getAccount
    while any(account(chain.job, node).call()[0] != plan.job.rounds for node in nodes):
        time.sleep(_LOOK_S)
