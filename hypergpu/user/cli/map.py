"""`hypergpu map`: have every item of some data done on the nodes that are there."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from hypergpu.user.terminal.commands import (
    AsJson,
    CoordinatorAddress,
    TokenFile,
    usage_error,
    with_options,
)
from hypergpu.user.terminal.output import note, say, say_json, size, span

if TYPE_CHECKING:
    from hypergpu.user.client import Coordinator
    from hypergpu.user.farm.map_run import MapOutput
    from hypergpu.user.farm.starting import MapOrder
    from hypergpu.user.farm.trial import MapEstimate, MapTrial


COME_BACK = "the same command with --resume"


class MapOptions(NamedTuple):
    """Settings of the job, and what becomes of it."""

    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .jsonl or .parquet.")] = (
        Path("output.parquet")
    )
    base: Annotated[
        str, typer.Option(metavar="FOLDER", help="The model, or its name in the hub's cache.")
    ] = ""
    allow_hub: Annotated[
        bool, typer.Option("--allow-hub", help="Download the model from the hub if need be.")
    ] = False
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting, as max_new_tokens=64; repeatable."
        ),
    ] = None
    text_field: Annotated[
        str, typer.Option(help="Field that is the item; else text, prompt or the only one.")
    ] = ""
    id_field: Annotated[str, typer.Option(help="Field with a row's id; else its position.")] = ""
    name: Annotated[str, typer.Option(help="Name of the job.")] = ""
    seed: Annotated[int, typer.Option(help="What random draws follow from.")] = 0
    nodes: Annotated[int, typer.Option(min=0, help="Nodes at most; 0: all that fit.")] = 0
    share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of a device that the work needs.")
    ] = 1.0
    price: Annotated[
        str, typer.Option(help="Price of 100 units, in the smallest unit of money.")
    ] = ""
    budget: Annotated[str, typer.Option(help="The most that the job may cost.")] = ""
    checks: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Share of the items that two nodes do in secret."),
    ] = 0.03
    require: Annotated[
        list[str] | None,
        typer.Option(metavar="RULE", help="What nodes must have, as gpu >= 8GB; repeatable."),
    ] = None
    limit: Annotated[
        int, typer.Option(min=0, help="Try this many items on one node, and write no output.")
    ] = 0
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say what it comes to, and send nothing.")
    ] = False
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an unfinished run of this output.")
    ] = False
    force: Annotated[
        bool, typer.Option("--force", help="Replace the output, or an unfinished run.")
    ] = False


@with_options(MapOptions)
def map_command(
    options: MapOptions,
    kind: Annotated[
        str, typer.Argument(help="embed, score, generate, classify, image, checksum; or a file.")
    ],
    source: Annotated[
        Path | None,
        typer.Argument(metavar="[DATA]", help="A .jsonl, .csv or .parquet file, or a folder."),
    ] = None,
    *,
    as_json: AsJson = False,
    address: CoordinatorAddress = None,
    token_file: TokenFile = None,
) -> None:
    """Have each item of some data done on many machines: embeddings, scores, texts or labels."""
    from hypergpu.user.client import connect

    _check_options(options)
    order = _order(options, kind, source)
    with connect(address, token_file=token_file) as coordinator:
        if options.estimate:
            say_map_estimate(coordinator, order, as_json=as_json)
        elif options.limit:
            _say_trial(coordinator, order, as_json=as_json)
        else:
            run_map(coordinator, order, as_json=as_json)


def _check_options(options: MapOptions) -> None:
    if options.resume and options.force:
        raise usage_error("--resume goes on, and --force begins anew", "leave one of both out")
    if options.estimate and options.limit:
        raise usage_error("--estimate sends nothing to try", "leave one of both out")


def _order(options: MapOptions, kind: str, source: Path | None) -> "MapOrder":
    if kind.endswith(".toml") and source is None:
        return _order_of_file(options, Path(kind))
    if source is None:
        raise usage_error(f"{kind} needs data", "name a file or folder: hypergpu map KIND DATA")
    return _order_of_options(options, kind, source)


def _order_of_file(options: MapOptions, path: Path) -> "MapOrder":
    from hypergpu.user.farm.job_file import read_map_file

    order = read_map_file(path)
    if order is None:
        raise usage_error(
            f'{path} is no job file of kind = "map"', "submit it: hypergpu job submit"
        )
    return order._replace(
        may_resume=options.resume, may_overwrite=options.force, limit=options.limit
    )


_SETTING_NAMES = (
    *("base", "allow_hub", "text_field", "id_field", "name", "seed", "nodes", "share"),
    *("price", "budget", "checks"),
)
"""Options that are settings of the same name."""


def _order_of_options(options: MapOptions, kind: str, source: Path) -> "MapOrder":
    from hypergpu.user.farm.request import parameter_values, settings_of
    from hypergpu.user.farm.starting import MapOrder

    values = {name: getattr(options, name) for name in _SETTING_NAMES}
    values["parameters"] = parameter_values(options.settings or [])
    values["requirements"] = tuple(options.require or ())
    settings = settings_of(kind, values)
    settings.check()
    return MapOrder(
        settings,
        source,
        options.out,
        may_resume=options.resume,
        may_overwrite=options.force,
        limit=options.limit,
    )


def run_map(coordinator: "Coordinator", order: "MapOrder", *, as_json: bool) -> None:
    """Start a farm job, or go on with one, and write its output."""
    from hypergpu.user.farm.map_run import leaving_job
    from hypergpu.user.farm.starting import start_map

    run = start_map(coordinator, order)
    with leaving_job(run, COME_BACK):
        note(f"{run.id} runs; its results so far are in {order.out.name}.part/pieces")
        output = run.watch()
    _say_output(run.id, output, as_json=as_json)


def _say_output(job_id: str, output: "MapOutput", *, as_json: bool) -> None:
    from hypergpu.user.farm.map_run import MapDone

    if as_json:
        errors_file = None if output.errors_file is None else str(output.errors_file)
        say_json(MapDone(job_id, str(output.out), output.items, output.errors, errors_file))
        return
    say(f"{output.out}  {output.items} items")
    if output.errors_file is not None:
        say(f"{output.errors_file}  {output.errors} items without a value")


def _say_trial(coordinator: "Coordinator", order: "MapOrder", *, as_json: bool) -> None:
    import msgspec

    from hypergpu.user.farm.trial import try_map

    trial: MapTrial = try_map(coordinator, order)
    if as_json:
        say_json(trial)
        return
    say(f"{trial.items} items in {span(trial.seconds)} on one node, {trial.errors} without a value")
    say(f"{trial.units} {trial.unit}, cost {trial.cost} in the smallest unit of money")
    for row in trial.sample:
        text = msgspec.json.encode(row).decode()
        say(text if len(text) <= _ROW_LENGTH else f"{text[:_ROW_LENGTH]} ...")


_ROW_LENGTH = 200


def say_map_estimate(coordinator: "Coordinator", order: "MapOrder", *, as_json: bool) -> None:
    """Say what a farm job would come to."""
    from hypergpu.user.farm.trial import estimate_map

    estimate: MapEstimate = estimate_map(coordinator, order)
    if as_json:
        say_json(estimate)
        return
    say(f"{estimate.items} items, of which {estimate.rows_refused} rows cannot be used")
    say(f"{size(estimate.send_bytes)} to send")
    if estimate.nodes is not None:
        say(f"{estimate.nodes} connected nodes do {order.settings.item_kind}")
    cost = "by tokens, which nodes count" if estimate.cost is None else estimate.cost
    say(f"cost {cost}; try some for time and cost: --limit 20")
