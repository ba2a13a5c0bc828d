"""The strategy ``sync`` over the same lines: a few measured steps, as often as a target takes.

Running all of its steps over the worst grade would take hours and tell nothing more: each moves the
same bytes. How many it takes is counted on this machine's loopback, where links cost nothing.
"""

from pathlib import Path

from benchmarks.ours.awareness.figures import target_of
from benchmarks.ours.awareness.jobs import job_tree, write_job
from benchmarks.ours.awareness.runs import WORLDS, Runs
from hypergpu.cli.compare.outcome import step_time_us
from hypergpu.client.history import Reached

GRADES = WORLDS / "grades"
VIRTUAL_STEPS = 20
DIGITS = WORLDS / "jobs" / "digits.toml"


def reached_by_sync(runs: Runs, seed: int, job: Path = DIGITS) -> Reached:
    """Steps, samples and bytes to the target; the time is that of loopback and means nothing."""
    name = run_name("sync", seed, "near", job)
    words = ["--job", str(job), "--strategy", "sync", "--seed", str(seed), "--lan"]
    return target_of(runs.report(name, GRADES / "a.toml", words, backend="proxy"), name)


def naive_step_s(
    runs: Runs, grade: str, steps: int, job: Path = DIGITS, *, connections: int = 1
) -> float:
    """Seconds of a step over a grade's lines; the first, with its model's download, is left out.

    Args:
        runs: Keeps what is measured.
        grade: A file of `GRADES`.
        steps: How many are measured; 0: none, many are played in virtual time instead.
        job: What is trained.
        connections: Of each node.
    """
    path = _job_over(job, connections)
    words = ["--job", str(path), "--strategy", "sync", "--seed", "1", "--target", "0"]
    words += ["--rounds", str((steps or VIRTUAL_STEPS) + 1)]
    name = run_name("sync", 1, grade if steps else f"{grade}-virtual", job)
    backend = "tunnel" if steps else "world"
    report = runs.report(
        f"{name}-over-{connections}", GRADES / f"{grade}.toml", words, backend=backend
    )
    return step_time_us(report) / 1e6


def _job_over(job: Path, connections: int) -> Path:
    tree = job_tree(job)
    tree["strategy"] = "sync"
    tree["training"].pop("inner_steps", None)
    tree["round"] = {"connections": connections}
    tree.pop("outer", None)
    tree.pop("aware", None)
    return write_job(tree, f"{job.stem}-sync-over-{connections}")


def run_name(strategy: str, seed: int, place: str, job: Path) -> str:
    """What a run is called: the digits, which most runs train, are not named."""
    task = "" if job == DIGITS else f"{job.stem}-"
    return f"{task}{strategy}-{seed}-{place}"
