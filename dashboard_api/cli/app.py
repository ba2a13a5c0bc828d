"""`hypergpu dashboard`: serve the page for any coordinator, or make a fresh link."""

from pathlib import Path
from typing import Annotated

import typer

from hypergpu.user.terminal.commands import TokenFile

app = typer.Typer(
    help="Serve the page in which people watch, understand and steer training.",
    invoke_without_command=True,
    rich_markup_mode=None,
)


@app.callback()
def dashboard(  # noqa: PLR0913 - each is an option
    *,
    coordinator: Annotated[
        str | None,
        typer.Option(
            "--coordinator", metavar="HOST:PORT", help="Whom to show; else the token's own."
        ),
    ] = None,
    token_file: TokenFile = None,
    listen: Annotated[
        str | None, typer.Option("--listen", help="Address to bind; else this machine's own.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Else 7780; 0: any free.")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="A name browsers reach it by; repeatable."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Where history, sessions and uploads lie.")
    ] = None,
    comparisons: Annotated[
        Path | None,
        typer.Option("--comparisons", help="Results of `hypergpu compare`; else your own."),
    ] = None,
    recording: Annotated[
        Path | None, typer.Option("--recording", metavar="FILE", help="Show a recording instead.")
    ] = None,
    link: Annotated[
        bool, typer.Option("--link", help="Only print a fresh link of the page that runs here.")
    ] = False,
) -> None:
    """Serve the page until Ctrl-C, for the coordinator that the token names."""
    from dashboard_api.config import DashboardSettings
    from dashboard_api.shell.links import ask_for_link, run_dashboard
    from hypergpu.user.terminal.output import say

    flags = {
        "coordinator": coordinator,
        "token_file": token_file,
        "listen": listen,
        "port": port,
        "host": tuple(host) if host else None,
        "data_dir": data_dir,
        "comparisons": comparisons,
        "recording": recording,
    }
    settings: DashboardSettings = DashboardSettings(
        **{name: value for name, value in flags.items() if value is not None}  # type: ignore[arg-type]
    )
    if link:
        say(ask_for_link(settings))
        return
    run_dashboard(settings)
