"""`make demo FIXED=1 SCALE=1`: the demo past one machine, with options of `hypergpu demo`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from hypergpu.errors import HyperGPUError
from hypergpu.stdio import prepare_streams
from hypergpu.user.cli.machine import DemoNet, FixedOption, Metering, MeteringOption
from hypergpu.user.terminal.commands import Commands, report_error, usage_error

PROGRAM = "python -m benchmarks.ours.demo"
app = typer.Typer(
    cls=Commands, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


@app.callback()
def _root() -> None:
    """Demos that start more than HyperGPU brings along."""


@app.command()
def scale(  # noqa: PLR0913 - each is an option
    *,
    short: Annotated[bool, typer.Option("--short", help="Fewer rounds.")] = False,
    fixed: FixedOption = False,
    attack: Annotated[bool, typer.Option("--attack", help="Refused here.")] = False,
    out: Annotated[Path, typer.Option("--out", help="Logs, models, ledger.")] = Path("demo-out"),
    nodes: Annotated[int, typer.Option("--nodes", min=2, max=32, help="Number of nodes.")] = 5,
    worker: Annotated[
        str, typer.Option("--worker", help="torch or numpy; else what is installed.")
    ] = "",
    net: Annotated[
        DemoNet | None, typer.Option("--net", help="Refused here: nodes have no lines.")
    ] = None,
    metering: MeteringOption = Metering.BATCHED,
) -> None:
    """Train digits twice, the second time with the loss of the coordinator that drives."""
    from benchmarks.ours.demo.scale import demonstrate_scale
    from hypergpu.user.cli.demo.job import plan

    _check_options(is_fixed=fixed, is_attacked=attack, has_lines=net not in (None, DemoNet.NONE))
    demo_plan = plan(nodes, is_short=short, worker=worker, metering=metering, is_fixed=True)
    demonstrate_scale(out, demo_plan)


@app.command()
def stages(
    *,
    out: Annotated[Path, typer.Option("--out", help="Logs and data.")] = Path("demo-out"),
    net: Annotated[DemoNet, typer.Option("--net", help="Links of the nodes.")] = DemoNet.PROXY,
) -> None:
    """Fine-tune a model that no node may hold by a ring, kill a stage on the way, and ask it."""
    from benchmarks.ours.demo.stages import demonstrate_stages, prepared_base, run_over_lines
    from hypergpu.sites import told_sites

    prepared_base()
    if told_sites() is None and net is not DemoNet.NONE:
        run_over_lines(net, out)
    demonstrate_stages(out)


def _check_options(*, is_fixed: bool, is_attacked: bool, has_lines: bool) -> None:
    """Refuse options that mean something else than the loss of a coordinator."""
    if not is_fixed:
        raise usage_error("SCALE=1 compares models, which differ without FIXED=1", "add FIXED=1")
    if others := ["ATTACK"] * is_attacked + ["NET"] * has_lines:
        raise usage_error(f"{' and '.join(others)} cannot be had with SCALE=1", "leave it out")


def main() -> None:
    """Run the demo; the exit status tells the kind of failure as that of `hypergpu` does."""
    try:
        prepare_streams()
        app(prog_name=PROGRAM)
    except HyperGPUError as failure:
        sys.exit(report_error(failure))


if __name__ == "__main__":
    main()
