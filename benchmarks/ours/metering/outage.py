"""Training while the chain comes and goes: how much longer a round takes without it."""

import gzip
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.cluster import BenchmarkError, Running, running
from benchmarks.ours.estimates import IntervalEstimate, median_of
from benchmarks.ours.metering.chain import ask_anvil, connect, contract_at
from hypergpu.client import JobEvent
from hypergpu.jobfile.spec import Evaluation, JobSpec, Pay, TrainingSettings
from hypergpu.statements.domain import ZERO_ADDRESS
from payments.shell.anvil import Anvil, AnvilOptions, running_anvil

NODES = 4
_SETTLING_ROUNDS = 6
"""After each change, until the coordinator has met it and made up for it; they are not counted."""
_COUNTED_ROUNDS = 12
"""Between two changes, after those."""
_SPELL_ROUNDS = _SETTLING_ROUNDS + _COUNTED_ROUNDS
_WINDOW_S = 30
_SETTLED_WITHIN_S = 90.0
_LOOK_S = 0.5


class Slowdown(NamedTuple):
    """How much longer a round takes while the chain is away, as a ratio."""

    ratio: IntervalEstimate
    round_s: float
    """Median of a round while the chain is there."""


def measure_slowdown(folder: Path, count: int) -> Slowdown:
    """Train one job through outages, and see that all is paid in the end.

    Each spell without the chain is compared with its own neighbours, so that slow changes of the
    machine meet both. The chain goes as a service does that is stopped, with its state whole.

    Raises:
        BenchmarkError: The job broke, or not all that it earned was paid.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = AnvilOptions(state_file=folder / "anvil.json")
    with running_anvil(options, log_file=folder / "anvil.log") as anvil:
        settings = {
            "HYPERGPU_COORDINATOR_CHAIN": "anvil",
            "HYPERGPU_COORDINATOR_CHAIN_URL": anvil.url,
        }
        with running(folder, is_plaintext=True, settings=settings) as cluster:
            cluster.add_nodes(NODES, "numpy")
            spells_s = list(_spells_s(cluster, anvil, 2 * count + 1))
    # The chain is there in the first, the third ... and the last one.
    neighbours = zip(spells_s[0:-2:2], spells_s[1:-1:2], spells_s[2::2], strict=True)
    ratios = [away / statistics.mean((before, after)) for before, away, after in neighbours]
    return Slowdown(median_of(ratios), statistics.median(spells_s[::2]))


def _spells_s(cluster: Running, anvil: Anvil, count: int) -> Iterator[float]:
    """Median round of each spell; the chain goes and comes between them."""
    rounds = count * _SPELL_ROUNDS
    with cluster.client() as client:
        job_id = client.submit(_spec(rounds))
        ends_ms: list[int] = []
        for update in client.watch(job_id):
            if not isinstance(update, JobEvent):
                continue
            if update.kind == "JobPaused":
                raise BenchmarkError(f"the job was paused: {client.job(job_id).job.reason}")
            if update.kind != "RoundRecorded":
                continue
            ends_ms.append(update.at_ms)
            if len(ends_ms) % _SPELL_ROUNDS == 0:
                counted = itertools.pairwise(ends_ms[-_COUNTED_ROUNDS - 1 :])
                yield statistics.median((after - before) / 1000 for before, after in counted)
                if len(ends_ms) < rounds:
                    (_stop if anvil.is_running else Anvil.start)(anvil)
        summary = client.job(job_id).job
        if summary.phase != "finished" or len(ends_ms) != rounds:
            raise BenchmarkError(f"the job is {summary.phase}: {summary.reason}")
    _see_paid(anvil.url)


def _stop(anvil: Anvil) -> None:
    """Keep Anvil's state as it is between two blocks, and stop it."""
    web3 = connect(anvil.url)
    ask_anvil(web3, "evm_setIntervalMining", 0)
    state = ask_anvil(web3, "anvil_dumpState")
    if anvil.options.state_file is not None:
        anvil.options.state_file.write_bytes(gzip.decompress(bytes.fromhex(state[2:])))
    anvil.stop()


def _see_paid(url: str) -> None:
    """Wait until the ledger holds nothing but free escrow; its windows pass at once.

    Raises:
        BenchmarkError: It does not come to that, or nothing was paid.
    """
    web3 = connect(url)
    topic = contract_at(web3, "TrainingLedger", ZERO_ADDRESS).events.JobOpened().topic
    (opened,) = web3.eth.get_logs({"fromBlock": 0, "topics": [topic]})
    ledger = contract_at(web3, "TrainingLedger", opened["address"])
    token = contract_at(web3, "TestToken", ledger.functions.TOKEN().call())
    escrow = ledger.events.JobOpened().process_log(opened)["args"]["escrow"]
    give_up_at_s = time.monotonic() + _SETTLED_WITHIN_S
    while time.monotonic() < give_up_at_s:
        held = token.functions.balanceOf(ledger.address).call()
        if held == ledger.functions.getJob(opened["topics"][1]).call()[2] < escrow:
            return
        time.sleep(_LOOK_S)
        ask_anvil(web3, "evm_increaseTime", _WINDOW_S)
    raise BenchmarkError(f"not all that the job earned was paid within {_SETTLED_WITHIN_S:g} s")


def _spec(rounds: int) -> JobSpec:
    return JobSpec(
        workload="digits-softmax",
        training=TrainingSettings(rounds=rounds, inner_steps=50, nodes=NODES),
        evaluation=Evaluation(every=rounds),
        pay=Pay(unit_price=1_000_000),
    )
