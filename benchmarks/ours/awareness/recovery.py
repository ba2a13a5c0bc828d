"""All lines fall to a tenth and come back: for how many rounds at a stretch are forecasts bad?"""

from collections.abc import Sequence

from benchmarks.ours.awareness.changing import JOB, VARYING
from benchmarks.ours.awareness.runs import Runs, of_seeds
from benchmarks.table.parts import PartFigures
from hypergpu.client.history import RoundPoint
from netsim.run.report import RunReport

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
