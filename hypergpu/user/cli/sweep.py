"""`hypergpu sweep`: train a job's model once for each point of a grid."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from hypergpu.user.terminal.commands import (
    AsJson,
    CoordinatorAddress,
    TokenFile,
    usage_error,
    with_options,
)
from hypergpu.user.terminal.output import Column, note, numbers, say, say_json, say_table

if TYPE_CHECKING:
    from hypergpu.farm.map_request import ParameterValue
    from hypergpu.user.client import Coordinator
    from hypergpu.user.farm.sweep_run import SweepRequest, SweepRun

_SHOWN_MOST = 10


class SweepOptions(NamedTuple):
    """The points, how they are compared, and what becomes of the table."""

    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="KEY=VALUE,VALUE",
            help="Values of a key, as inner.learning_rate=1e-4,3e-4; repeatable.",
        ),
    ] = None
    metric: Annotated[
        str, typer.Option(help="Held-out metric to compare by: loss, accuracy, ...")
    ] = "loss"
    mode: Annotated[
        str, typer.Option(metavar="min|max", help="Whether it falls or rises; else by its name.")
    ] = ""
    stop_early: Annotated[
        int, typer.Option(help="One in so many goes on after each rung of halving; 0: all.")
    ] = 0
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .jsonl or .parquet.")] = (
        Path("sweep.parquet")
    )
    name: Annotated[str, typer.Option(help="Name of the job.")] = ""
    nodes: Annotated[int, typer.Option(min=0, help="Nodes at most; 0: all that fit.")] = 0
    checks: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share that two nodes do in secret.")
    ] = 0.03
    require: Annotated[
        list[str] | None,
        typer.Option(metavar="RULE", help="What nodes must have, as gpu >= 8GB; repeatable."),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an unfinished sweep of this output.")
    ] = False
    force: Annotated[
        bool, typer.Option("--force", help="Replace the output, or an unfinished sweep.")
    ] = False


@with_options(SweepOptions)
def sweep_command(
    options: SweepOptions,
    file: Annotated[Path, typer.Argument(help='A job file, or one of kind = "sweep".')],
    *,
    as_json: AsJson = False,
    address: CoordinatorAddress = None,
    token_file: TokenFile = None,
) -> None:
    """Train a job's model once for each point of a grid, on many machines, and compare them."""
    from hypergpu.user.client import connect

    if options.resume and options.force:
        raise usage_error("--resume goes on, and --force begins anew", "leave one of both out")
    order = _order(options, file)
    with connect(address, token_file=token_file) as coordinator:
        run_sweep(coordinator, order, as_json=as_json)


def _order(options: SweepOptions, file: Path) -> "SweepRequest":
    from hypergpu.farm.sweep_points import SWEEP_KIND
    from hypergpu.user.farm.request import settings_of
    from hypergpu.user.farm.sweep_file import read_sweep_file
    from hypergpu.user.farm.sweep_plan import job_of_file, sweep_plan
    from hypergpu.user.farm.sweep_run import SweepRequest

    order = read_sweep_file(file)
    if order is not None:
        if options.grid:
            raise usage_error(f"{file} has its own grid", "leave --grid out")
        return order._replace(may_resume=options.resume, may_overwrite=options.force)
    if not options.grid:
        raise usage_error("a sweep needs a grid", "--grid inner.learning_rate=1e-4,3e-4")
    spec, folder = job_of_file(file)
    choice = {"metric": options.metric, "mode": options.mode, "stop_early": options.stop_early}
    plan = sweep_plan(spec, _grid(options.grid), folder, choice)
    values: dict[str, Any] = {
        "name": options.name or spec.name,
        "nodes": options.nodes,
        "checks": options.checks,
        "requirements": tuple(options.require or ()),
    }
    settings = settings_of(SWEEP_KIND, values)
    settings.check()
    return SweepRequest(plan, settings, options.out, options.resume, options.force)


def _grid(words: Sequence[str]) -> "dict[str, list[ParameterValue]]":
    """Values by key; what is no JSON is a text."""
    from hypergpu.user.farm.request import parameter_values

    grid: dict[str, list[ParameterValue]] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not key or not sign:
            raise usage_error(f"{word!r} is no KEY=VALUE,VALUE", "--grid inner.beta1=0.9,0.95")
        if key in grid:
            raise usage_error(f"--grid names {key} twice", "name all its values at once")
        grid[key] = [parameter_values([f"{key}={each}"])[key] for each in text.split(",")]
    return grid


def run_sweep(coordinator: "Coordinator", order: "SweepRequest", *, as_json: bool) -> None:
    """Start a sweep, or go on with one, and write its output."""
    from hypergpu.user.farm.sweep_run import SweepRun

    run = SweepRun(coordinator, order)
    try:
        points = len(order.plan.points)
        note(f"{run.id or 'the sweep'} trains {points} points{_rung_text(run)}")
        output = run.watch()
    except KeyboardInterrupt:
        note(f"{run.id} goes on; come back to it: the same command with --resume")
        raise
    if as_json:
        from hypergpu.user.farm.map_run import MapDone

        errors_file = None if output.errors_file is None else str(output.errors_file)
        say_json(MapDone(run.id, str(output.out), output.items, output.errors, errors_file))
        return
    _say_best(run, order)
    say(f"{output.out}  {output.items} points, {output.errors} without a metric")


def _rung_text(run: "SweepRun") -> str:
    count = len(run.rungs)
    return f" in {count} rungs, each a job of its own" if count > 1 else ""


def _say_best(run: "SweepRun", order: "SweepRequest") -> None:
    from hypergpu.user.farm.sweep_run import best_rows

    rows = best_rows(list(run.rows()), order.plan.mode, _SHOWN_MOST)
    keys = order.plan.keys
    columns = (*map(Column, keys), *numbers(order.plan.metric, "steps"))
    cells = [
        (*(str(row[key]) for key in keys), f"{row['metric']:.6g}", str(row["steps"]))
        for row in rows
    ]
    say_table(columns, cells, empty="no point has a metric")
