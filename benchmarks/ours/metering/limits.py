"""What the figures of a run are held against: signatures alone, transfers alone, a block's gas."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
from coincurve import PrivateKey, PublicKey

from benchmarks.ours.metering.stage import Stage, stage
from coordinator.core.settlement.sealing import Metering
from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.chain.sending import Intent
from hypergpu.chain.ledger import ContractCall
from hypergpu.chain.local.anvil import AnvilOptions
from hypergpu.keys.keccak import keccak

_LOOK_S = 0.02
_TRANSFER_GAS = 21_000
_SOMEBODY = keccak(b"somebody's wallet")[-20:]
_EACH = 4_000


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
        list(pool.map(on_one_core, [_EACH] * cores))
        return _EACH * cores / (time.monotonic() - begun_s)


def transfers_per_s(folder: Path, transfers: int) -> float:
    """How many transactions Anvil takes that do nothing, signed before they are timed."""
    with stage(folder, Metering.EACH, block_time_s=1) as here:
        call = ContractCall(b"", _TRANSFER_GAS)
        intents = [Intent(f"bare/{number}", _SOMEBODY, call) for number in range(transfers)]
        transactions = signed(here, intents)
        begun_s = time.monotonic()
        into_blocks(here, transactions)
        seconds = time.monotonic() - begun_s
        here.inclusions("bare/")
    return transfers / seconds


def gas_limit_per_s(gas_each: float) -> float:
    """How many transactions a second the blocks hold that take so much gas each."""
    options = AnvilOptions()
    return options.block_gas_max / options.block_time_s / gas_each


def signed(here: Stage, intents: list[Intent]) -> list[tuple[bytes, bytes]]:
    """The transactions for what is intended, by hash and bytes."""
    here.account.seal(intents, here.chain.head())
    rows = here.journal.transactions(here.account.name, states=[TransactionState.WAITING], limit=0)
    return [(row.attempts[0].attempt.hash, row.attempts[0].raw) for row in rows]


def into_blocks(here: Stage, transactions: list[tuple[bytes, bytes]]) -> None:
    """Send as fast as it is taken, and wait until the last is in a block."""
    nonce = here.account.next_nonce()
    here.chain.send(transactions)
    while here.chain.next_nonce(here.account.address) < nonce:
        time.sleep(_LOOK_S)


def chain_cpu_s() -> float:
    """CPU seconds of every Anvil that this process runs."""
    spent = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.name() == "anvil":
                times = child.cpu_times()
                spent += times.user + times.system
    return spent
