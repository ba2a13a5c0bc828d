"""A world that changes: ``aware`` against fixed settings and against its own first plan.

Every fixed setting is ranked before any is run over true links: the length of its rounds in this
world in virtual time, times the rounds that the target takes it on loopback. The best three run.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.awareness.figures import NotReachedError, spread, target_of, times
from benchmarks.ours.awareness.jobs import Tree, job_tree, write_job
from benchmarks.ours.awareness.runs import WORLDS, Runs, of_seeds
from benchmarks.table.parts import PartFigures
from hypergpu.jobfile.spec import SPARSE_SCHEMES

VARYING = WORLDS / "changing" / "varying.toml"
JOB = WORLDS / "jobs" / "digits.toml"
INNER_STEPS = (10, 20, 40)
CODECS = ("int4", "topk64")
QUORUMS = (1.0, 0.6)
BEST = 3
CONNECTIONS = 16
"""Connections of each node under every fixed setting, as plans give lines that lose packets."""
STEPS = 1600
"""Inner steps after which a fixed setting is given up: several times what the target takes."""
VIRTUAL_ROUNDS = 40
PROMISED_STATIC, PROMISED_FROZEN = 1.2, 1.3


class Fixed(NamedTuple):
    """One setting that stays. A quorum below 1 comes with a deadline: else it means nothing."""

    inner_steps: int
    codec: str
    quorum: float

    @property
    def name(self) -> str:
        """For folders and tables."""
        return f"{self.codec}-h{self.inner_steps}-q{round(100 * self.quorum)}"

    @property
    def deadline_ms(self) -> int:
        """Twice the steps of most nodes, and what most transfers take: beyond it one is late."""
        return 0 if self.quorum == 1.0 else 100 * self.inner_steps + 4000


GRID = tuple(itertools.starmap(Fixed, itertools.product(INNER_STEPS, CODECS, QUORUMS)))


def changing_figures(runs: Runs, *, seeds: int) -> PartFigures:
    """Both ratios."""
    numbers = range(1, seeds + 1)
    ours = of_seeds(numbers, lambda seed: (seed, *_run_varying(runs, "aware", JOB, seed)))
    ours_s = [seconds for _, seconds, _ in ours]
    plans = {seed: plan for seed, _, plan in ours}

    def frozen_plan_s(seed: int) -> float:
        plan = plans[seed]
        return _run_varying(runs, f"frozen-{plan.name}", written_job(plan), seed)[0]

    frozen_s = of_seeds(plans, frozen_plan_s)
    ranked = ranking(runs)
    fixed_s = {plan: _median_s(runs, plan, numbers) for plan in ranked[:BEST]}
    best = min(fixed_s, key=lambda plan: fixed_s[plan])
    ours_middle_s = statistics.median(ours_s)
    over_static = fixed_s[best] / ours_middle_s
    over_frozen = statistics.median(frozen_s) / ours_middle_s
    tried = ", ".join(f"{plan.name} {seconds:.3g} s" for plan, seconds in fixed_s.items())
    return PartFigures(
        rows=[
            (
                "changing world, best fixed setting beside it",
                spread(ours_s),
                f"{fixed_s[best]:.3g} s ({best.name})",
                times(over_static),
                f"{PROMISED_STATIC}x",
            ),
            (
                "changing world, its first plan kept beside it",
                spread(ours_s),
                spread(frozen_s),
                times(over_frozen),
                f"{PROMISED_FROZEN}x",
            ),
        ],
        metrics={
            "adaptive_over_best_static": over_static,
            "adaptive_over_no_adaptation": over_frozen,
        },
        notes=[f"Of {len(GRID)} fixed settings the best {BEST} by forecast were run: {tried}."],
    )


def ranking(runs: Runs) -> list[Fixed]:
    """Settings whose target is reached at all, the fastest by forecast first."""
    forecasts: dict[Fixed, float] = {}
    for plan in GRID:
        try:
            forecasts[plan] = _rounds_wanted(runs, plan) * _virtual_round_s(runs, plan)
        except NotReachedError:
            continue
    return sorted(forecasts, key=lambda plan: forecasts[plan])


def fixed_tree(plan: Fixed) -> Tree:
    """The job with a fixed setting in it. Sparse schemes take the plain outer step."""
    tree = job_tree(JOB)
    tree["strategy"] = "diloco"
    tree["training"] |= {"inner_steps": plan.inner_steps, "rounds": STEPS // plan.inner_steps}
    tree["round"] = {"connections": CONNECTIONS}
    if plan.deadline_ms:
        tree["round"] |= {"quorum": plan.quorum, "deadline": f"{plan.deadline_ms}ms"}
    tree["codec"] = {"up": plan.codec, "down": _down(plan.codec)}
    if plan.codec in SPARSE_SCHEMES:
        tree.pop("outer", None)
    return tree


def written_job(plan: Fixed) -> Path:
    """The same as a file."""
    return write_job(fixed_tree(plan), plan.name)


def _down(codec: str) -> str:
    """Scheme of the way down: the sum of eight sparse updates needs a denser one."""
    return "topk256" if codec in SPARSE_SCHEMES else codec


def _run_varying(runs: Runs, name: str, job: Path, seed: int) -> tuple[float, Fixed]:
    """Seconds to the target in the world that changes, and what most were told in round two."""
    strategy = "aware" if job == JOB else "diloco"
    words = ["--job", str(job), "--strategy", strategy, "--seed", str(seed)]
    report = runs.report(f"{name}-{seed}-varying", VARYING, words, backend="tunnel")
    # Nothing is known of anybody before the first round: the second plan is the first that is one.
    told = report.rounds[min(1, len(report.rounds) - 1)]
    codec = Counter(told.codecs).most_common(1)[0][0] if told.codecs else "int4"
    return target_of(report, name).at_ms / 1000, Fixed(max(1, told.inner_steps), codec, 1.0)


def _median_s(runs: Runs, plan: Fixed, seeds: Sequence[int]) -> float:
    job = written_job(plan)
    return statistics.median(
        of_seeds(seeds, lambda seed: _run_varying(runs, plan.name, job, seed)[0])
    )


def _rounds_wanted(runs: Runs, plan: Fixed) -> int:
    """On loopback; the quorum changes nothing there, since nobody is late."""
    name = f"near-{plan.codec}-h{plan.inner_steps}"
    words = ["--job", str(written_job(plan._replace(quorum=1.0))), "--strategy", "diloco"]
    words += ["--seed", "1", "--lan"]
    return target_of(runs.report(name, VARYING, words, backend="proxy"), name).rounds


def _virtual_round_s(runs: Runs, plan: Fixed) -> float:
    words = ["--job", str(written_job(plan)), "--strategy", "diloco", "--target", "0"]
    words += ["--rounds", str(VIRTUAL_ROUNDS)]
    report = runs.report(f"virtual-{plan.name}", VARYING, words, backend="world")
    return report.rounds[-1].ended_ms / len(report.rounds) / 1000
