"""A centralised cluster to the target: DistributedDataParallel of as many processes on loopback."""

import statistics
import sys
from functools import cache
from pathlib import Path

import msgspec

from benchmarks.ours.awareness.runs import DIGITS, NotReachedError, write_job
from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.job_files import job_tree
from benchmarks.peers.seconds import run_peer

FLOOR_MS = 200
CHANNELS = 64
"""Width of the digits' network, which then has 356,618 parameters. On two cores a step of eight
processes takes less than the floor, also by Muon; with the 108 of other runs Muon takes 100 ms.
"""
RATES = (0.0001, 0.00025, 0.0005, 0.001, 0.002)
"""Learning rates that DDP has the best of, by each optimizer."""
QUICK_RATES = (0.00025, 0.001)
OUR_RATE = 0.002
ROUNDS = 36
"""Our settings: of rates of 0.001 and 0.002 and of 6, 12, 24 and 36 rounds, one or two seeds each,
the quickest (docs/log.md).
"""
UTILISATION_LEAST = 0.97
"""Share of the steps' time that is their floor. Below it the machine is what is measured."""
STEPS_MOST = 400
EVALUATE_EVERY = 5
_LIMIT_S = 900


class DdpOutcome(msgspec.Struct, frozen=True):
    """What the script reports."""

    steps: int
    """Steps to the first evaluation at the target; 0: not reached."""
    seconds: float
    metric: float

    @property
    def utilisation(self) -> float:
        """Share of the steps' time that is their floor."""
        return self.steps * FLOOR_MS / 1000 / self.seconds


def centralised_job(optimizer: str, rate: float) -> Path:
    """The job of both sides, with an optimizer and its learning rate."""
    tree = job_tree(DIGITS)
    tree["options"]["channels"] = CHANNELS
    tree["inner"] |= {"optimizer": optimizer, "learning_rate": rate}
    return write_job(tree, f"{DIGITS.stem}-{CHANNELS}-{optimizer}-{rate:g}")


def job_of_short_rounds(optimizer: str, rate: float) -> Path:
    """The same work for ours in rounds of about two seconds, so that evaluations come as often."""
    tree = job_tree(centralised_job(optimizer, rate))
    training = tree["training"]
    steps = training["rounds"] * training["inner_steps"]
    training |= {"rounds": ROUNDS, "inner_steps": steps // ROUNDS}
    tree["aware"]["rounds_min"] = ROUNDS
    return write_job(tree, f"{DIGITS.stem}-{CHANNELS}-{optimizer}-{rate:g}-{ROUNDS}")


def train_to_target(optimizer: str, rate: float, seed: int, *, floor_ms: int) -> DdpOutcome:
    """Train the digits until the target, or give up.

    Raises:
        BenchmarkError: A process failed.
    """
    words = [f"--job={centralised_job(optimizer, rate)}", f"--seed={seed}"]
    words += [f"--floor-ms={floor_ms}", f"--steps-most={STEPS_MOST}"]
    words += [f"--evaluate-every={EVALUATE_EVERY}"]
    name = f"ddp-{optimizer}-{rate:g}-{seed}"
    command = [sys.executable, "-m", "benchmarks.peers.ddp_trained", *words]
    last_line, _ = run_peer(name, command, _LIMIT_S)
    outcome = msgspec.json.decode(last_line, type=DdpOutcome)
    sys.stderr.write(f"{name}: {outcome.steps or 'over ' + str(STEPS_MOST)} steps\n")
    return outcome


@cache
def best_rate(optimizer: str, seeds: int, rates: tuple[float, ...]) -> float:
    """The learning rate of the fewest steps, without floors: they change no step's result.

    Raises:
        NotReachedError: No rate comes to the target with half of the seeds.
    """
    steps = {
        rate: statistics.median(
            train_to_target(optimizer, rate, seed, floor_ms=0).steps or float("inf")
            for seed in range(1, seeds + 1)
        )
        for rate in rates
    }
    best = min(steps, key=lambda rate: steps[rate])
    if steps[best] == float("inf"):
        raise NotReachedError(f"DDP by {optimizer} was nowhere at the target in {STEPS_MOST} steps")
    return best


def centralised_seconds(optimizer: str, rate: float, seed: int) -> float:
    """Time from the first step to the first evaluation at the target.

    Raises:
        NotReachedError: It never was there.
        BenchmarkError: The machine was too slow for the floors: the time is void.
    """
    outcome = train_to_target(optimizer, rate, seed, floor_ms=FLOOR_MS)
    if not outcome.steps:
        raise NotReachedError(f"DDP by {optimizer} at {rate:g} was at {outcome.metric:.3f}")
    if outcome.utilisation < UTILISATION_LEAST:
        raise BenchmarkError(
            f"void: DDP's utilisation was {outcome.utilisation:.3f}, {UTILISATION_LEAST:g} at least"
            " is wanted. Fix: measure on a machine without other work"
        )
    return outcome.seconds


def floored_world(world: Path, folder: Path) -> Path:
    """A copy of a world's file in which steps have the same floor."""
    text = world.read_text(encoding="utf-8").replace("../jobs", str(DIGITS.parent))
    path = folder / world.name
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("step_floor_ms = 50", f"step_floor_ms = {FLOOR_MS}"), "utf-8")
    return path
