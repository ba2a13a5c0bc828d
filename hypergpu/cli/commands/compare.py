"""`hypergpu compare`: a job by several strategies over the same bad links."""

from pathlib import Path
from typing import Annotated

import typer

from hypergpu.terminal.options import YEAR_S, AsJson, seconds_within

MISSED_STATUS = 1
SyncSteps = Annotated[
    int,
    typer.Option(
        "--sync-steps", min=0, help="Steps of sync measured over the lines; 0: all to the end."
    ),
]
GiveUpAfter = Annotated[
    float,
    typer.Option(
        "--give-up-after",
        parser=seconds_within(1, YEAR_S),
        metavar="DURATION",
        help="Of one run: 10m, 2h.",
        show_default="1h",
    ),
]


def compare(  # noqa: PLR0913 - each is an option
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="Your job file.")],
    *,
    world: Annotated[
        Path, typer.Option("--world", metavar="WORLD.toml", help="Nodes and their lines.")
    ],
    strategies: Annotated[
        str, typer.Option("--strategies", help="Of sync, fedavg, diloco, aware.")
    ] = "sync,diloco,aware",
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=100, help="Runs a strategy.")] = 3,
    backend: Annotated[
        str, typer.Option("--backend", help="proxy, tunnel (real packets; root) or tc.")
    ] = "proxy",
    target: Annotated[
        float | None,
        typer.Option("--target", min=0, help="Metric to reach; else the job's own."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Results, and what is finished already.")
    ] = Path("compare-out"),
    sync_steps: SyncSteps = 20,
    worker: Annotated[
        str, typer.Option("--worker", help="torch, numpy or null; else what is installed.")
    ] = "auto",
    give_up_after: GiveUpAfter = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Train a job by several strategies over the same lines and show which is there first."""
    from hypergpu.cli.compare.compare import compared
    from hypergpu.cli.compare.order import Order, checked_order, strategy_words
    from hypergpu.cli.compare.running import interrupt_on_term, said_in_pieces
    from hypergpu.cli.compare.told import tell
    from hypergpu.terminal.output import note

    order = Order(
        job=job,
        world=world,
        strategies=strategy_words(strategies),
        seeds=seeds,
        backend=backend,
        target=target,
        out=out,
        sync_steps=sync_steps,
        worker=worker,
        give_up_after_s=give_up_after,
    )
    interrupt_on_term()
    try:
        found, files = compared(checked_order(order), said_in_pieces)
    except KeyboardInterrupt:
        note(f"what is finished is kept in {out}; the same command goes on from there")
        raise
    tell(found, files, as_json=as_json)
    if not found.is_good:
        raise typer.Exit(MISSED_STATUS)
