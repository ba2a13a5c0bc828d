"""Time to accuracy of network-aware training: against naive training, Flower, fixed settings.

In a world that changes every fixed setting is ranked before any is run over true links: the length
of its rounds in virtual time, times the rounds that the target takes it on loopback. The best
three run.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.awareness.ddp import ddp_figures
from benchmarks.ours.awareness.flower import flower_figures
from benchmarks.ours.awareness.runs import (
    COLUMNS,
    DIGITS,
    WORLDS,
    NotReachedError,
    Runs,
    aware_report,
    naive_step_s,
    of_seeds,
    reached_by_sync,
    run_name,
    spread,
    target_of,
    times,
    write_job,
)
from benchmarks.ours.job_files import Tree, job_tree
from benchmarks.ours.table import BenchmarkParts, PartFigures, measure_part, merge_figures
from hypergpu.jobfile.reading import read_job_file
from hypergpu.jobfile.spec import SPARSE_CODECS
from hypergpu.user.client.history import RoundPoint
from netsim.run.report import RunReport

TEXT = WORLDS / "jobs" / "text.toml"
PROMISED = {"a": 5, "b": 10, "c": 30, "d": 30}
BESIDE = {"c-independent": "C, losses one by one", "c-bbr": "C between hosts with BBR"}
"""Second columns: no promise rests on them."""
NAIVE_CONNECTIONS = {"a": 4, "b": 16, "c": 16, "d": 16, "c-independent": 16, "c-bbr": 1}
"""Connections of each naive node, as plans give on the same lines."""


DDP_GRADES = ("a", "b")
"""Grades where somebody might still use it."""


class SeedsAndSteps(NamedTuple):
    """How much is measured."""

    seeds: int
    steps: int
    """Measured steps of the naive strategy over the grades A to C."""
    slow_steps: int
    """The same over D."""

    def steps_of(self, grade: str) -> int:
        """Over one grade."""
        return self.slow_steps if grade == "d" else self.steps


QUICK = SeedsAndSteps(seeds=1, steps=4, slow_steps=2)
WHOLE = SeedsAndSteps(seeds=3, steps=10, slow_steps=4)


def aware_seconds(runs: Runs, grade: str, seed: int, job: Path = DIGITS) -> float:
    """Time to the target, counted from the opening of the first round."""
    report = aware_report(runs, grade, seed, job)
    return target_of(report, run_name("aware", seed, grade, job)).at_ms / 1000


def aware_median_s(runs: Runs, grade: str, seeds: int) -> float:
    """The same, the middle of the seeds from 1 on."""
    every = of_seeds(range(1, seeds + 1), lambda seed: aware_seconds(runs, grade, seed))
    return statistics.median(every)


def grade_figures(runs: Runs, effort: SeedsAndSteps, *, is_quick: bool) -> PartFigures:
    """All four grades; the whole benchmark has two more worlds of grade C beside them."""
    steps = {seed: reached_by_sync(runs, seed).rounds for seed in range(1, effort.seeds + 1)}
    grades = (*PROMISED, *(() if is_quick else BESIDE))
    every = [
        measure_part(f"grade {grade}", partial(_of_one, runs, grade, effort, steps))
        for grade in grades
    ]
    return merge_figures([*every, PartFigures(notes=[_note(effort, list(steps.values()))])])


def text_figures(runs: Runs, effort: SeedsAndSteps) -> PartFigures:
    """A second task, on grade C: the byte-level GPT to a stated perplexity."""
    seeds = range(1, effort.seeds + 1)
    step_s = naive_step_s(runs, "c", effort.steps, TEXT, connections=NAIVE_CONNECTIONS["c"])
    naive_s = [reached_by_sync(runs, seed, TEXT).rounds * step_s for seed in seeds]
    ours_s = of_seeds(seeds, lambda seed: aware_seconds(runs, "c", seed, TEXT))
    ratio = statistics.median(naive_s) / statistics.median(ours_s)
    what = f"C: GPT to perplexity {read_job_file(TEXT).evaluation.target:g}, naive beside it"
    return PartFigures(
        rows=[(what, spread(ours_s), spread(naive_s), times(ratio), "")],
        metrics={"text_tta_ratio_c": ratio},
    )


def _of_one(runs: Runs, grade: str, effort: SeedsAndSteps, steps: Mapping[int, int]) -> PartFigures:
    several = NAIVE_CONNECTIONS[grade]
    step_s = naive_step_s(runs, grade, effort.steps_of(grade), connections=several)
    lone_step_s = naive_step_s(runs, grade, 0)
    naive_s = [count * step_s for count in steps.values()]
    ours_s = of_seeds(steps, lambda seed: aware_seconds(runs, grade, seed))
    ratio = statistics.median(naive_s) / statistics.median(ours_s)
    lone = ratio * lone_step_s / step_s
    key = grade.replace("-", "_")
    promise = f"{PROMISED[grade]}x" if grade in PROMISED else ""
    what = BESIDE.get(grade, f"{grade.upper()}: to 97 %, naive beside it")
    rows = [
        (f"{what}, {several} connections", spread(ours_s), spread(naive_s), times(ratio), promise)
    ]
    if several > 1:
        rows.append(("   naive over one connection", "", "", times(lone), ""))
    return PartFigures(
        rows=rows,
        metrics={
            f"tta_ratio_{key}": ratio,
            f"tta_ratio_{key}_one_connection": lone,
        },
    )


def _note(effort: SeedsAndSteps, steps: list[int]) -> str:
    step_counts = ", ".join(map(str, steps))
    return (
        f"Naive: {effort.steps} measured steps ({effort.slow_steps} on D), times the steps that the"
        f" target took on loopback ({step_counts}); over one connection steps in virtual time."
    )


VARYING = WORLDS / "changing" / "varying.toml"
JOB = WORLDS / "jobs" / "digits.toml"
INNER_STEPS = (10, 20, 40)
CODECS = ("int4", "topk64")
QUORUMS = (1.0, 0.6)
BEST = 3
FIXED_CONNECTIONS = 16
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
    ranked_plans = ranking(runs)
    fixed_s = {plan: _median_s(runs, plan, numbers) for plan in ranked_plans[:BEST]}
    best = min(fixed_s, key=lambda plan: fixed_s[plan])
    ours_middle_s = statistics.median(ours_s)
    over_static = fixed_s[best] / ours_middle_s
    over_frozen = statistics.median(frozen_s) / ours_middle_s
    trial_list = ", ".join(f"{plan.name} {seconds:.3g} s" for plan, seconds in fixed_s.items())
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
        notes=[
            f"Of {len(GRID)} fixed settings the best {BEST} by forecast were run: {trial_list}."
        ],
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
    """The job with a fixed setting in it. Sparse codecs take the plain outer step."""
    tree = job_tree(JOB)
    tree["strategy"] = "diloco"
    del tree["aware"]
    tree["training"] |= {"inner_steps": plan.inner_steps, "rounds": STEPS // plan.inner_steps}
    tree["round"] = {"connections": FIXED_CONNECTIONS}
    if plan.deadline_ms:
        tree["round"] |= {"quorum": plan.quorum, "deadline": f"{plan.deadline_ms}ms"}
    tree["codec"] = {"up": plan.codec, "down": _down(plan.codec)}
    if plan.codec in SPARSE_CODECS:
        tree.pop("outer", None)
    return tree


def written_job(plan: Fixed) -> Path:
    """The same as a file."""
    return write_job(fixed_tree(plan), plan.name)


def _down(codec: str) -> str:
    """Codec of the way down: the sum of eight sparse updates needs a denser one."""
    return "topk256" if codec in SPARSE_CODECS else codec


def _run_varying(runs: Runs, name: str, job: Path, seed: int) -> tuple[float, Fixed]:
    """Seconds to the target in the world that changes, and what most were told in round two."""
    strategy = "aware" if job == JOB else "diloco"
    words = ["--job", str(job), "--strategy", strategy, "--seed", str(seed)]
    report = runs.report(f"{name}-{seed}-varying", VARYING, words, backend="tunnel")
    # Nothing is known of anybody before the first round: the second plan is the first that is one.
    second_round = report.rounds[min(1, len(report.rounds) - 1)]
    codec = Counter(second_round.codecs).most_common(1)[0][0] if second_round.codecs else "int4"
    return target_of(report, name).at_ms / 1000, Fixed(max(1, second_round.inner_steps), codec, 1.0)


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


ROUNDS = 40
"""Inner steps of so many of the job's rounds: lines fall and come back before they are done."""
WARM_UP_ROUNDS = 2
"""Nothing is known in the first round, and the second rests on one measurement."""
BAD_ERROR = 0.25
PROMISED_ROUNDS = 3


def recovery_figures(runs: Runs, *, seeds: int) -> PartFigures:
    """The longest stretch of any seed, the round in which the lines changed counted in."""
    reports = of_seeds(range(1, seeds + 1), lambda seed: _long_run(runs, seed))
    stretches = [longest_bad_stretch(report.rounds) for report in reports]
    what = f"tenfold drop and return: rounds at a stretch forecast over {BAD_ERROR:.0%} off"
    each = ", ".join(map(str, stretches))
    return PartFigures(
        rows=[(what, f"{max(stretches)}", "", "", f"{PROMISED_ROUNDS}")],
        metrics={"recovery_rounds": float(max(stretches))},
        notes=[f"Forecasts after a drop: longest bad stretch of each seed's rounds: {each}."],
    )


def longest_bad_stretch(rounds: Sequence[RoundPoint]) -> int:
    """How many rounds on end were forecast badly; a round that nobody forecast does not end it."""
    longest = now = 0
    for each in rounds[WARM_UP_ROUNDS:]:
        if each.forecast_error is not None:
            now = now + 1 if each.forecast_error > BAD_ERROR else 0
            longest = max(longest, now)
    return longest


def _long_run(runs: Runs, seed: int) -> RunReport:
    words = ["--job", str(JOB), "--strategy", "aware", "--seed", str(seed)]
    words += ["--target", "0", "--rounds", str(ROUNDS)]
    return runs.report(f"aware-{seed}-recovery", VARYING, words, backend="tunnel")


_NOTES = (
    "Digits CNN of 1,010,458 parameters, 8 nodes, batch 4, steps of 50 ms or more, to 97 %.",
    "CUBIC hosts, losses four in a row, 100 Mbit/s at the coordinator; medians of seeds.",
)


def parts(is_quick: bool) -> BenchmarkParts:
    """Its parts; one whose target was never reached says so and has no figure."""
    runs = Runs()
    effort = QUICK if is_quick else WHOLE

    def beside_flower() -> PartFigures:
        return flower_figures(aware_median_s(runs, "c", effort.seeds))

    def beside_ddp(grade: str) -> PartFigures:
        seeds = range(1, effort.seeds + 1)
        steps = statistics.median(reached_by_sync(runs, seed).rounds for seed in seeds)
        return ddp_figures(grade, aware_median_s(runs, grade, effort.seeds), steps)

    def notes() -> list[str]:
        notes = [*_NOTES]
        if is_quick:
            notes.append("Quick: without Flower, without fixed settings in a world that changes.")
        return [*notes, runs.note()]

    measures: dict[str, Callable[[], PartFigures]] = {
        "grades": lambda: grade_figures(runs, effort, is_quick=is_quick)
    }
    if not is_quick:
        measures |= {
            "text": lambda: text_figures(runs, effort),
            "flower": beside_flower,
            "ddp": lambda: merge_figures(
                [
                    measure_part(f"DDP on {grade.upper()}", partial(beside_ddp, grade))
                    for grade in DDP_GRADES
                ]
            ),
            "changing": lambda: changing_figures(runs, seeds=effort.seeds),
            "recovery": lambda: recovery_figures(runs, seeds=effort.seeds),
        }
    return BenchmarkParts(title="Time to accuracy", columns=COLUMNS, parts=measures, notes=notes)
