"""The `hypergpu` command. Importing this module imports no gRPC, no torch and no rich."""

import os
import sys
from importlib.metadata import entry_points
from typing import Annotated

import typer

from hypergpu.command_line import version_option
from hypergpu.errors import HyperGPUError
from hypergpu.stdio import prepare_streams
from hypergpu.user.cli import gateway, job, key, lifecycle, machine, node, token, workload
from hypergpu.user.cli.convert import convert_command
from hypergpu.user.cli.map import map_command
from hypergpu.user.cli.plan import plan_command
from hypergpu.user.cli.predict import predict_command
from hypergpu.user.cli.serve import serve_command
from hypergpu.user.cli.sweep import sweep_command
from hypergpu.user.terminal.commands import Commands, report_error

app = typer.Typer(
    name="hypergpu",
    cls=Commands,
    help="Train one model together on many machines over links nobody controls.",
    no_args_is_help=True,
    # Rich help takes a quarter of a second to import; plain help a tenth.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(machine.up)
app.command()(machine.join)
app.command()(machine.status)
app.command()(lifecycle.leave)
app.command()(gateway.gateway)
app.add_typer(job.app, name="job")
app.command(name="map")(map_command)
app.command(name="serve")(serve_command)
app.command(name="predict")(predict_command)
app.command(name="plan")(plan_command)
app.command(name="convert")(convert_command)
app.add_typer(key.app, name="key")
app.command(name="sweep")(sweep_command)
app.add_typer(node.app, name="node")
app.add_typer(token.app, name="token")
app.add_typer(workload.app, name="workload")
app.command()(machine.demo)
# Groups of commands, or a command, of other packages.
for _point in entry_points(group="hypergpu.cli"):
    _plugin = _point.load()
    if isinstance(_plugin, typer.Typer):
        app.add_typer(_plugin, name=_point.name)
    else:
        app.command(name=_point.name)(_plugin)
app.command()(machine.doctor)
app.command()(machine.env)
app.command()(lifecycle.upgrade)
app.command()(lifecycle.uninstall)
app.add_typer(machine.config, name="config")


@app.callback()
def _root(
    *,
    _version: Annotated[bool, version_option("hypergpu")] = False,
) -> None:
    """Options that belong to no command."""


def main() -> None:
    """Run the command line; the exit status tells the kind of failure (docs/cli.md)."""
    # What gRPC logs of its own accord is said again by our errors. Programs we start inherit this.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        prepare_streams()
        app(prog_name="hypergpu")
    except HyperGPUError as failure:
        sys.exit(report_error(failure))
    except BrokenPipeError:
        # Whoever read our output has enough of it; nothing is left to say to anybody.
        sys.stderr.close()
        sys.exit(0)
