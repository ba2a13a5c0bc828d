"""`hypergpu-node`: the daemon of one machine that trains."""

import asyncio
import contextlib
import errno
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from gpu_node.config import NodeSettings
from gpu_node.core.commands import Departure
from gpu_node.core.idle_reasons import work_summary
from gpu_node.core.limits import OwnerLimits
from gpu_node.shell.daemon.machine import MachineOrder, machine_daemons, serve_machine
from gpu_node.shell.folder.state import StatePaths, authority_digest, load_coordinator
from gpu_node.shell.owner.leaving import drain_daemon, forget_coordinator, forget_node
from gpu_node.shell.owner.limits_file import check_coordinator, load_limits, written_settings
from gpu_node.shell.owner.viewer import run_viewer
from hypergpu.command_line import version_option
from hypergpu.errors import HyperGPUError, Reason, missing_extra
from hypergpu.keys import (
    Passphrase,
    change_passphrases,
    passphrase_beside,
    passphrase_of_file,
    passphrase_of_text,
    stored_address,
)
from hypergpu.node_report import DEVICE_FOLDERS
from hypergpu.privacy import make_files_private
from hypergpu.process import configure_logs, keep_bulk_memory
from hypergpu.stdio import prepare_streams
from hypergpu.wire.credentials import Token, parse_token

TOKEN_VARIABLE = "HYPERGPU_NODE_TOKEN"
PASSPHRASE_VARIABLE = "HYPERGPU_NODE_PASSPHRASE"
STOPPED_STATUS = 1
"""Exit status after a second SIGTERM: work may be unfinished."""

app = typer.Typer(
    help="Train models for a HyperGPU coordinator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options(
    *,
    _version: Annotated[bool, version_option("hypergpu-node")] = False,
) -> None:
    """Train models for a HyperGPU coordinator."""


_StateDir = Annotated[Path | None, typer.Option(help="Where identity, certificate and caches lie.")]
WorkerKind = Annotated[str | None, typer.Option(help="auto, torch, numpy or null.")]
WorkerPath = Annotated[
    str | None,
    typer.Option(
        "--worker-python",
        metavar="PATH",
        help="Python that runs the worker, with torch and without HyperGPU; auto: one that is made"
        " where this one has no torch.",
    ),
]
_CongestionControl = Annotated[
    str | None,
    typer.Option(help="system, or bbr for the route to the coordinator alone; needs root."),
]
_JoinTokenFile = Annotated[
    str | None,
    typer.Option(help=f"File with the join token, - for stdin; else ${TOKEN_VARIABLE}."),
]

Limit = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="KEY=VALUE",
        help="A limit of the owner's, over those in node.toml; repeatable: docs/node.md.",
    ),
]
Devices = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="A device that gets a node: a GPU's index or UUID, or cpu; repeatable. Else all GPUs.",
    ),
]
PassphraseFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the passphrase of the node's key, - to be asked;"
        f" else ${PASSPHRASE_VARIABLE}, else one that is made."
    ),
]


Live = Annotated[
    bool,
    typer.Option(
        "--live",
        help="Show what the node does on this terminal; logs go to node.log in its folder.",
    ),
]


@app.command()
def join(  # noqa: PLR0913 - each is an option
    token_file: _JoinTokenFile = None,
    state_dir: _StateDir = None,
    worker: WorkerKind = None,
    worker_python: WorkerPath = None,
    congestion_control: _CongestionControl = None,
    passphrase_file: PassphraseFile = None,
    *,
    limit: Limit = None,
    device: Devices = None,
    live: Live = False,
    only: Annotated[bool, typer.Option("--only", help="Exit once joined.")] = False,
) -> None:
    """Trade a token for a certificate, then serve like `run`, which needs no token afterwards."""
    settings = settings_of(
        state_dir=state_dir,
        worker=worker,
        worker_python=worker_python,
        congestion_control=congestion_control,
        passphrase_file=passphrase_file,
        devices=",".join(device) if device else None,
    )
    token = _token(token_file)
    with StatePaths(settings.state_dir) as paths, _named_storage_errors(paths.root):
        limits = load_limits(paths.root, limit or ())
        for address in token.addresses:
            check_coordinator(limits, address, token.authority)
        typer.echo(work_summary(limits), err=True)
        if not only:
            _serve(settings, paths, token, limits=limits, is_live=live)
            return
        configure_logs(settings.log_level)
        order = MachineOrder(settings, limits, token, _passphrase(settings))
        with machine_daemons(paths, order) as daemons:
            for daemon in daemons:
                coordinator = asyncio.run(daemon.join())
                typer.echo(f"{daemon.session.node} joined {coordinator.address}")


@app.command()
def run(  # noqa: PLR0913 - each is an option
    state_dir: _StateDir = None,
    worker: WorkerKind = None,
    worker_python: WorkerPath = None,
    congestion_control: _CongestionControl = None,
    passphrase_file: PassphraseFile = None,
    *,
    limit: Limit = None,
    device: Devices = None,
    live: Live = False,
) -> None:
    """Serve the coordinator until SIGTERM, which drains; a second one stops at once."""
    settings = settings_of(
        state_dir=state_dir,
        worker=worker,
        worker_python=worker_python,
        congestion_control=congestion_control,
        passphrase_file=passphrase_file,
        devices=",".join(device) if device else None,
    )
    with StatePaths(settings.state_dir) as paths, _named_storage_errors(paths.root):
        if (coordinator := load_coordinator(paths)) is None:
            raise HyperGPUError(Reason.NODE_NOT_JOINED, f"{paths.root} holds no certificate")
        limits = load_limits(paths.root, limit or ())
        check_coordinator(limits, coordinator.address, authority_digest(paths))
        _serve(settings, paths, limits=limits, is_live=live)


@app.command()
def leave(
    state_dir: _StateDir = None,
    *,
    forget_key: Annotated[
        bool,
        typer.Option(
            "--forget-key", help="Delete the key and the receipts, too: unpaid pay is lost."
        ),
    ] = False,
) -> None:
    """Drain the daemon, then delete its certificate, work and caches. The key stays."""
    settings = settings_of(state_dir=state_dir)
    paths = StatePaths(settings.state_dir)
    _check_identity(paths)
    address, coordinator = stored_address(paths.identity), load_coordinator(paths)
    with drain_daemon(settings, paths):
        if forget_key:
            forget_node(paths)
        else:
            forget_coordinator(paths)
    typer.echo(f"{address} left {coordinator.address if coordinator else 'no coordinator'}")
    typer.echo(f"{'nothing' if forget_key else 'its key and its receipts'} stayed in {paths.root}")


@app.command()
def show(state_dir: _StateDir = None) -> None:
    """Print who this node is and whom it joined. The daemon may run."""
    paths = StatePaths(settings_of(state_dir=state_dir).state_dir)
    _check_identity(paths)
    coordinator, node = load_coordinator(paths), stored_address(paths.identity)
    typer.echo(f"node         {node}")
    typer.echo(f"coordinator  {coordinator.address if coordinator else 'none yet'}")
    typer.echo(f"state        {paths.root}")


@app.command()
def passphrase(
    new: Annotated[Path, typer.Option(help="File with the passphrase from now on.")],
    state_dir: _StateDir = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Encrypt the keys of all devices under another passphrase. The daemon must not run."""
    settings = settings_of(state_dir=state_dir, passphrase_file=passphrase_file)
    _check_identity(StatePaths(settings.state_dir))
    with StatePaths(settings.state_dir) as paths:
        old = _passphrase(settings) or passphrase_beside(paths.root, paths.identity)
        devices = sorted(paths.root.glob(f"{DEVICE_FOLDERS}/{paths.identity.name}"))
        keys = [paths.identity, *devices]
        change_passphrases(keys, old, passphrase_of_file(new.expanduser()))
    typer.echo(f"from now on: --passphrase-file {new}")


def _serve(
    settings: NodeSettings,
    paths: StatePaths,
    token: Token | None = None,
    *,
    limits: OwnerLimits,
    is_live: bool,
) -> None:
    """Run the machine's daemons until they leave, beside what shows them on the terminal where that
    is wanted.
    """
    log_file = paths.log if is_live else None
    configure_logs(settings.log_level, log_file)
    order = MachineOrder(settings, limits, token, _passphrase(settings), log_file)
    with machine_daemons(paths, order) as daemons:
        keep_bulk_memory()
        paths.name_daemon()
        for daemon in daemons:
            daemon.reporter.write()
        with run_viewer(paths.root) if is_live else contextlib.nullcontext():
            leaves = asyncio.run(serve_machine(daemons))
    departures = [leave for leave in leaves if leave.departure is not Departure.DRAINED]
    for leave in departures:
        typer.echo(f"hypergpu-node: {leave.departure.value}: {leave.reason}", err=True)
    if departures:
        is_rejected = departures[0].departure is Departure.REJECTED
        raise typer.Exit(Reason.TOKEN_INVALID.exit_code if is_rejected else STOPPED_STATUS)


def settings_of(**flags: Any) -> NodeSettings:
    """Flags first, then the environment, then what the owner wrote into the node's folder.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, with the setting and what is wrong with it; FILE_UNUSABLE,
            the owner's file cannot be read.
    """
    given_values = {name: value for name, value in flags.items() if value is not None}
    prefix = str(NodeSettings.model_config["env_prefix"])
    stored_values = {
        name: value
        for name, value in written_settings(_checked_settings(given_values).state_dir).items()
        if f"{prefix}{name.upper()}" not in os.environ
    }
    return _checked_settings(stored_values | given_values)


def _checked_settings(given: Mapping[str, Any]) -> NodeSettings:
    try:
        return NodeSettings(**given)
    except ValidationError as invalid:
        problems = "; ".join(
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in invalid.errors()
        )
        raise HyperGPUError(Reason.ARGUMENT_INVALID, problems) from invalid


def _check_identity(paths: StatePaths) -> None:
    """Check that the folder has a node's key: commands that only read make none.

    Raises:
        HyperGPUError: NODE_NOT_JOINED, it has none.
    """
    if not paths.identity.exists():
        detail = f"there is no node's key in {paths.root}"
        fix = "name its folder: --state-dir FOLDER; hypergpu-node join --token-file FILE makes one"
        raise HyperGPUError(Reason.NODE_NOT_JOINED, detail, fix=fix)


def _passphrase(settings: NodeSettings) -> Passphrase | None:
    """The passphrase of the node's key, where an operator gives one.

    It leaves the environment, which the worker inherits.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be used.
    """
    text = os.environ.pop(PASSPHRASE_VARIABLE, "")
    if settings.passphrase_file is not None:
        return passphrase_of_file(settings.passphrase_file.expanduser())
    return passphrase_of_text(text, f"${PASSPHRASE_VARIABLE}") if text else None


def _token(source: str | None) -> Token:
    """The join token, which never travels as an argument: others can read those.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, FILE_UNUSABLE or TOKEN_INVALID.
    """
    if source == "-":
        return parse_token(sys.stdin.readline())
    if source is not None:
        try:
            return parse_token(Path(source).expanduser().read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise HyperGPUError(Reason.FILE_UNUSABLE, f"{source}: {error}") from error
    if text := os.environ.get(TOKEN_VARIABLE):
        return parse_token(text)
    detail = f"no token: name a file with --token-file, or set {TOKEN_VARIABLE}"
    raise HyperGPUError(Reason.ARGUMENT_INVALID, detail)


def _report(error: HyperGPUError) -> int:
    typer.echo(f"hypergpu-node: {error.detail}\nfix: {error.fix}", err=True)
    return error.reason.exit_code


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextlib.contextmanager
def _named_storage_errors(root: Path) -> Iterator[None]:
    """Report a folder of the node that takes no file in one sentence, with what is needed.

    Raises:
        HyperGPUError: DISK_FULL or FILE_UNUSABLE.
    """
    try:
        yield
    except OSError as error:
        place = Path(error.filename or root)
        detail = f"{place}: {error.strerror}"
        if error.errno in _FULL:
            fix = f"free 1 MB in {root} for the node's own files, and what node.toml calls disk"
            fix += " for models and data; or choose another folder: --state-dir FOLDER"
            raise HyperGPUError(Reason.DISK_FULL, detail, fix=fix) from error
        if not place.is_relative_to(root):
            raise
        fix = f"let this user write into {root}, or choose another folder: --state-dir FOLDER"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix) from error


def main() -> None:
    """Entry point of `hypergpu-node`."""
    # gRPC's own log lines repeat our errors, and would break JSON lines.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        prepare_streams()
        make_files_private()
        app()
    except HyperGPUError as error:
        sys.exit(_report(error))
    except ModuleNotFoundError as absence:
        if (extra_error := missing_extra(absence)) is None:
            raise
        sys.exit(_report(extra_error))


if __name__ == "__main__":
    main()
