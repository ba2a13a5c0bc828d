"""A world that changes: ``aware`` against fixed settings and against its own first plan.

Every fixed setting is ranked before any is run over true links: the length of its rounds in this
world in virtual time, times the rounds that the target takes it on loopback. The best three run.
"""

import itertools
import json
import statistics
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.awareness.figures import Figures, NotReachedError, spread, target_of, times
from benchmarks.ours.awareness.runs import KEPT, WORLDS, Runs
from hypergpu.spec import SPARSE_SCHEMES

VARYING = WORLDS / "changing" / "varying.toml"
JOB = WORLDS / "jobs" / "digits.toml"
INNER_STEPS = (10, 20, 40)
CODECS = ("int4", "topk64")
QUORUMS = (1.0, 0.6)
BEST = 3
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


def changing_figures(runs: Runs, *, seeds: int) -> Figures:
    """Both ratios."""
    numbers = range(1, seeds + 1)
    ours = [_varied(runs, "aware", JOB, seed) for seed in numbers]
    ours_s = [seconds for seconds, _ in ours]
    frozen_s = [
        _varied(runs, f"frozen-{plan.name}", written_job(plan), seed)[0]
        for seed, (_, plan) in zip(numbers, ours, strict=True)
    ]
    ranked = ranking(runs)
    fixed_s = {plan: _median_s(runs, plan, numbers) for plan in ranked[:BEST]}
    best = min(fixed_s, key=lambda plan: fixed_s[plan])
    ours_middle_s = statistics.median(ours_s)
    over_static = fixed_s[best] / ours_middle_s
    over_frozen = statistics.median(frozen_s) / ours_middle_s
    tried = ", ".join(f"{plan.name} {seconds:.3g} s" for plan, seconds in fixed_s.items())
    return Figures(
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


def job_text(plan: Fixed) -> str:
    """The job file with a fixed setting in it. Sparse schemes take the plain outer step."""
    tree = tomllib.loads(JOB.read_text(encoding="utf-8"))
    tree["strategy"] = "diloco"
    tree["training"]["inner_steps"] = plan.inner_steps
    tree["round"] = {}
    if plan.deadline_ms:
        tree["round"] = {"quorum": plan.quorum, "deadline": f"{plan.deadline_ms}ms"}
    tree["codec"] = {"up": plan.codec, "down": _down(plan.codec)}
    if plan.codec in SPARSE_SCHEMES:
        tree.pop("outer", None)
    return "\n".join(_lines(tree))


def written_job(plan: Fixed) -> Path:
    """The same as a file."""
    path = KEPT / "jobs" / f"{plan.name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(job_text(plan), encoding="utf-8")
    return path


def _lines(tree: Mapping[str, object]) -> Iterator[str]:
    """A job file's tree as TOML: texts, numbers, and tables of them."""
    tables = {name: each for name, each in tree.items() if isinstance(each, dict)}
    yield from (f"{name} = {json.dumps(each)}" for name, each in tree.items() if name not in tables)
    for name, table in tables.items():
        yield f"[{name}]"
        yield from (f"{key} = {json.dumps(each)}" for key, each in table.items())


def _down(codec: str) -> str:
    """Of eight sparse updates the sum is not sparse: it travels as one dense enough."""
    return "topk256" if codec in SPARSE_SCHEMES else codec


def _varied(runs: Runs, name: str, job: Path, seed: int) -> tuple[float, Fixed]:
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
    return statistics.median(_varied(runs, plan.name, job, seed)[0] for seed in seeds)


def _rounds_wanted(runs: Runs, plan: Fixed) -> int:
    """On loopback; the quorum changes nothing there, since nobody is late."""
    name = f"near-{plan.codec}-h{plan.inner_steps}"
    words = ["--job", str(written_job(plan._replace(quorum=1.0))), "--strategy", "diloco"]
    words += ["--seed", "1", "--lan", "--rounds", str(1600 // plan.inner_steps)]
    return target_of(runs.report(name, VARYING, words, backend="proxy"), name).rounds


def _virtual_round_s(runs: Runs, plan: Fixed) -> float:
    words = ["--job", str(written_job(plan)), "--strategy", "diloco", "--target", "0"]
    words += ["--rounds", str(VIRTUAL_ROUNDS)]
    report = runs.report(f"virtual-{plan.name}", VARYING, words, backend="world")
    return report.rounds[-1].ended_ms / len(report.rounds) / 1000
