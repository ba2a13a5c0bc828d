"""`hypergpu compare`, also `hypergpu netsim compare`: strategies side by side on one's own job.

What it does is imported when it runs: help needs none of it.
"""

from pathlib import Path
from typing import Annotated

import typer

from hypergpu.user.terminal.commands import YEAR_S, AsJson, seconds_within

MISSED_STATUS = 1
SyncSteps = Annotated[
    int,
    typer.Option(
        "--sync-steps",
        min=0,
        max=1_000_000_000,
        help="Steps of sync measured over the lines; 0: all to the end.",
    ),
]
GiveUpAfter = Annotated[
    float,
    typer.Option(
        "--give-up-after",
        parser=seconds_within(1, YEAR_S),
        metavar="DURATION",
        help="Time limit of one run, such as 10m; else 1h.",
        show_default=False,
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
    """Compare strategies on your job over the same bad lines."""
    from netsim.compare.compare import ComparisonOrder, run_comparison

    order = ComparisonOrder(
        job=job,
        world=world,
        strategies=tuple(word.strip() for word in strategies.split(",") if word.strip()),
        seeds=seeds,
        backend=backend,
        target=target,
        out=out,
        sync_steps=sync_steps,
        worker=worker,
        give_up_after_s=give_up_after,
    )
    if not run_comparison(order, as_json=as_json).is_good:
        raise typer.Exit(MISSED_STATUS)
