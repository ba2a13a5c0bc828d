"""A comparison for people: a table, and what must be known to read it. Pure."""

from collections.abc import Iterator

from hypergpu.cli.compare.comparison import Comparison, Spread, StrategyStanding
from hypergpu.cli.compare.outcome import EXTRAPOLATED, StrategyRun
from hypergpu.terminal.figures import score, size, span
from hypergpu.terminal.output import Column


def columns(comparison: Comparison) -> tuple[Column, ...]:
    """Titles."""
    return (
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


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """A row a strategy."""
    return [_row(each) for each in comparison.strategies]


def _row(each: StrategyStanding) -> tuple[str, ...]:
    return (
        each.strategy,
        span(each.time_ms.median / 1000) if each.time_ms else "not reached",
        _range(each.time_ms),
        times(each.times_faster),
        _bytes(each.bytes_up),
        _bytes(each.bytes_down),
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


def _range(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{span(spread.least / 1000)}..{span(spread.most / 1000)}"


def _bytes(spread: Spread | None) -> str:
    return "-" if spread is None else size(spread.median)


def _how(each: StrategyStanding) -> str:
    words = [each.how]
    if each.runs_reached < each.runs:
        words.append(f"{each.runs_reached} of {each.runs} reached it")
    if each.runs_invalid:
        words.append(f"INVALID {each.runs_invalid} of {each.runs}")
    return ", ".join(words)


def footnotes(comparison: Comparison) -> Iterator[str]:
    """What the table cannot say."""
    yield f"faster and fewer bytes: than {comparison.baseline}, by the medians of the seeds"
    yield from _about_steps(comparison)
    for run in comparison.outcomes:
        if run.to_target is None:
            yield _missed_text(run, comparison)
        if not run.is_valid:
            yield f"{run.strategy}, seed {run.seed}: {run.verdict}"


def _about_steps(comparison: Comparison) -> Iterator[str]:
    runs = [run for run in comparison.outcomes if run.how == EXTRAPOLATED]
    if runs:
        each = ", ".join(f"{run.step_us / 1e6:.2f}" for run in runs)
        yield (
            f"{runs[0].strategy} is extrapolated: steps to the target counted on a LAN, times the"
            f" seconds that a step took in this world ({each}); --sync-steps 0 runs it whole"
        )


def _missed_text(run: StrategyRun, comparison: Comparison) -> str:
    named = f"{run.strategy}, seed {run.seed}"
    goal = f"{comparison.metric_name} {comparison.target:g}"
    return (
        f"{named}: never reached {goal}, ended at {score(run.metric)} ({run.phase}: {run.reason})"
    )


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
