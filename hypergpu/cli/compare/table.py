"""A comparison for people: a table and its footnotes. Pure."""

from collections.abc import Iterator

from hypergpu.cli.compare.outcome import (
    EXTRAPOLATED,
    Comparison,
    StrategyRun,
    StrategyStanding,
)
from hypergpu.terminal.figures import score, size, span
from hypergpu.terminal.output import Column, Table


def standings_table(comparison: Comparison) -> Table:
    """Columns, and a row a strategy."""
    columns = (
        Column("strategy"),
        Column(f"to {comparison.metric_name} {comparison.target:g}", is_number=True),
        Column("least..most", is_number=True),
        Column("faster", is_number=True),
        Column("up", is_number=True),
        Column("down", is_number=True),
        Column("fewer bytes", is_number=True),
        Column("samples", is_number=True),
        Column("final", is_number=True),
        Column("how"),
    )
    return columns, [_row(each) for each in comparison.strategies]


def _row(each: StrategyStanding) -> tuple[str, ...]:
    time_ms = each.time_ms
    return (
        each.strategy,
        span(time_ms.median / 1000) if time_ms else "not reached",
        f"{span(time_ms.least / 1000)}..{span(time_ms.most / 1000)}" if time_ms else "-",
        times(each.times_faster),
        size(each.bytes_up.median) if each.bytes_up else "-",
        size(each.bytes_down.median) if each.bytes_down else "-",
        times(each.times_fewer_bytes),
        str(each.samples.median) if each.samples else "-",
        score(each.metric),
        _how(each),
    )


def times(ratio: float | None) -> str:
    """A ratio in three digits."""
    if ratio is None:
        return "-"
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.3g}x"


def _how(each: StrategyStanding) -> str:
    words = [each.how]
    if each.runs_reached < each.runs:
        words.append(f"{each.runs_reached} of {each.runs} reached it")
    if each.runs_invalid:
        words.append(f"INVALID {each.runs_invalid} of {each.runs}")
    return ", ".join(words)


def footnotes(comparison: Comparison) -> Iterator[str]:
    """Sentences without which the table would be misread."""
    yield f"faster and fewer bytes: than {comparison.baseline}, by the medians of the seeds"
    if runs := [run for run in comparison.outcomes if run.how == EXTRAPOLATED]:
        each = ", ".join(f"{run.step_us / 1e6:.2f}" for run in runs)
        yield (
            f"{runs[0].strategy} is extrapolated: steps to the target counted on a LAN, times the"
            f" seconds that a step took in this world ({each}); --sync-steps 0 runs it whole"
        )
    goal = f"{comparison.metric_name} {comparison.target:g}"
    for run in comparison.outcomes:
        named = f"{run.strategy}, seed {run.seed}"
        if run.to_target is None:
            end = f"ended at {score(run.metric)} ({run.phase}: {run.reason})"
            yield f"{named}: never reached {goal}, {end}"
        if not run.is_valid:
            yield f"{named}: {run.verdict}"


def outcome_text(run: StrategyRun) -> str:
    """One run in a line, as soon as it is done."""
    doubt = "" if run.is_valid else "; INVALID"
    there = run.to_target
    if there is None:
        return f"target not reached, ended at {score(run.metric)}{doubt}"
    return (
        f"{span(there.at_ms / 1000)}, {there.samples} samples,"
        f" {size(there.bytes_up)} up, {size(there.bytes_down)} down{doubt}"
    )
