"""`python -m benchmarks.ours.metering.process PLAN`: measures rounds and settles them.

It may be killed at any instant and started again: the journal holds every round that was measured.
"""

import asyncio
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.ours.metering.host import SettlementRun, run_payments
from hypergpu.process import configure_logs

STAKED = "staked"
"""A file in the plan's folder: the nodes have their stakes."""
KEPT = "kept.txt"
"""A line for each round: its epoch, and when it was in the journal."""
_LOOK_S = 0.05


async def run_job(plan: SettlementRun) -> None:
    """Measure the rest of the rounds, then settle until killed."""
    folder, job = Path(plan.folder), plan.job
    async with run_payments(plan) as here:
        kept_rounds = here.first_round
        while not (folder / STAKED).exists():
            _say(plan, kept_rounds)
            await asyncio.sleep(_LOOK_S)
        for round_ in range(here.first_round, job.rounds):
            here.host.append(job.job_id, [job.round_row(round_, here.terms)])
            with (folder / KEPT).open("a") as file:
                file.write(f"{round_ // job.rounds_per_epoch} {time.time_ns() // 1_000_000}\n")
            here.payments.wake()
            kept_rounds = round_ + 1
            _say(plan, kept_rounds)
            await asyncio.sleep(plan.round_ms / 1000)
        here.end(plan)
        here.payments.wake()
        while True:
            _say(plan, kept_rounds)
            await asyncio.sleep(_LOOK_S)


def _say(plan: SettlementRun, rounds: int) -> None:
    """Print how many receipts the journal stands for."""
    sys.stdout.write(f"{rounds * plan.job.nodes}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    configure_logs()
    asyncio.run(run_job(msgspec.json.decode(sys.argv[1], type=SettlementRun)))
