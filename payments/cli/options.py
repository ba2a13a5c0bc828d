"""Options that several commands of ``hypergpu ledger`` take; help loads them and little else."""

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from hypergpu.user.terminal.commands import AsJson, CoordinatorAddress, JobName, TokenFile

ChainUrl = Annotated[
    str, typer.Option("--chain-url", metavar="URL", help="RPC of the chain; else a public one.")
]
NodeFolder = Annotated[
    Path | None, typer.Option("--state-dir", help="The node's folder, with its key and receipts.")
]
NodesPassphraseFile = Annotated[
    Path | None,
    typer.Option("--passphrase-file", help="Opens the key; else the file beside its folder."),
]
HeldJobName = Annotated[
    str | None, typer.Argument(metavar="JOB", help="Id of a job of this node, or its beginning.")
]
_OfJob = Annotated[
    str | None,
    typer.Option("--job", metavar="JOB", help="One on the ledger that is meant, if several are."),
]


class JobAt(NamedTuple):
    """A job of a coordinator."""

    job: JobName = None
    address: CoordinatorAddress = None
    token_file: TokenFile = None


class NamedJobAt(NamedTuple):
    """A job of a coordinator that must be named."""

    job: Annotated[str, typer.Argument(metavar="JOB", help="Its id or the beginning of it.")]
    address: CoordinatorAddress = None
    token_file: TokenFile = None


class NodeOptions(NamedTuple):
    """This machine's node, and the ledger that it acts on."""

    job: _OfJob = None
    chain_url: ChainUrl = ""
    state_dir: NodeFolder = None
    passphrase_file: NodesPassphraseFile = None
    as_json: AsJson = False
