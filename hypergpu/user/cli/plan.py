"""`hypergpu plan`: which nodes could hold a model, and what is missing."""

from typing import TYPE_CHECKING, Annotated

import typer

from hypergpu.user.terminal.commands import AsJson, CoordinatorAddress, TokenFile
from hypergpu.user.terminal.output import Column, note, numbers, say, say_json, say_table

if TYPE_CHECKING:
    from hypergpu.user.serving.plan import ModelPlan


def plan_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The model's folder, whose config.json is enough, or a GGUF file.",
        ),
    ],
    dtype: Annotated[
        str, typer.Option(help="What parameters are held as: float32, bfloat16 or float16.")
    ] = "bfloat16",
    *,
    as_json: AsJson = False,
    address: CoordinatorAddress = None,
    token_file: TokenFile = None,
) -> None:
    """Tell which nodes could hold a model, whole or in stages, and what memory is missing."""
    from hypergpu.rings.stage_work import STAGE_KIND
    from hypergpu.user.client import connect
    from hypergpu.user.serving.plan import plan_model
    from hypergpu.user.serving.stage_files import read_sizes
    from hypergpu.user.training.bases import find_model

    path = find_model(model)
    sizes = read_sizes(path, dtype)
    with connect(address, token_file=token_file) as coordinator:
        plan = plan_model(model, sizes, coordinator.nodes(), STAGE_KIND)
    if as_json:
        say_json(plan)
    else:
        _say_plan(plan)
    if not plan.is_possible:
        raise typer.Exit(1)


def _say_nodes(plan: "ModelPlan") -> None:
    """What each node could hold by itself."""
    rows = [
        (
            each.name or each.node,
            str(each.layers),
            f"{each.missing_bytes / 1e9:.2f} GB" if each.missing_bytes else "-",
            each.reason,
        )
        for each in plan.nodes
    ]
    columns = (Column("NODE"), *numbers("COULD HOLD", "LACKS FOR ALL"), Column("WHY NOT"))
    say_table(columns, rows, empty="no node is known")


def _say_plan(plan: "ModelPlan") -> None:
    say(f"{plan.model}: {plan.kind}, {plan.total_bytes / 1e9:.2f} GB")
    _say_nodes(plan)
    if not plan.is_possible:
        say(f"no nodes that are there can hold it: {plan.missing_bytes / 1e9:.2f} GB are missing")
        note("connect more nodes that may serve: hypergpu join TOKEN --kinds serve")
        return
    rows = [
        (each.name or each.node, str(each.layers), f"{each.memory_bytes / 1e9:.2f} GB")
        for each in plan.stages
    ]
    say_table((Column("NODE"), *numbers("LAYERS", "MEMORY")), rows, empty="")
    way = f", and {plan.hops_ms:.1f} ms of each token between them" if len(rows) > 1 else ""
    say(f"{len(rows)} of the nodes hold it{way}")
    command = "hypergpu serve FOLDER" + (f" --stages {len(rows)}" if len(rows) > 1 else "")
    note(f"begin: {command}; speed: hypergpu doctor --for FOLDER on a node, or once it is held")
