"""Options that several commands of ``hypergpu ledger`` take; help loads them and little else."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from hypergpu.terminal.commands import Address, AsJson, JobName, TokenFile

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from payments.cli.account import LedgerAccount

ChainUrl = Annotated[
    str, typer.Option("--chain-url", metavar="URL", help="RPC of the chain; else a public one.")
]
StateDir = Annotated[
    Path | None, typer.Option("--state-dir", help="The node's folder, with its key and receipts.")
]
NodesPassphraseFile = Annotated[
    Path | None,
    typer.Option("--passphrase-file", help="Opens the key; else the file beside its folder."),
]
HeldJob = Annotated[
    str | None, typer.Argument(metavar="JOB", help="Id of a job of this node, or its beginning.")
]
_OfJob = Annotated[
    str | None,
    typer.Option("--job", metavar="JOB", help="One on the ledger that is meant, if several are."),
]


class JobAt(NamedTuple):
    """A job of a coordinator."""

    job: JobName = None
    address: Address = None
    token_file: TokenFile = None


class NamedJobAt(NamedTuple):
    """A job of a coordinator that must be named."""

    job: Annotated[str, typer.Argument(metavar="JOB", help="Its id or the beginning of it.")]
    address: Address = None
    token_file: TokenFile = None


class NodeOptions(NamedTuple):
    """This machine's node, and the ledger that it acts on."""

    job: _OfJob = None
    chain_url: ChainUrl = ""
    state_dir: StateDir = None
    passphrase_file: NodesPassphraseFile = None
    as_json: AsJson = False

    def act(self, work: "Callable[[LedgerAccount], Awaitable[None]]") -> None:
        """Open the node's account on the one ledger of its jobs, act, and print what was done."""
        from payments.cli.account import (
            NODE_KEY,
            folder_named,
            held_jobs,
            one_ledger,
            open_account,
            open_key,
        )
        from payments.cli.service import run
        from payments.cli.show import say_act

        folder = folder_named("state_dir", self.state_dir)
        domain = one_ledger(held_jobs(folder, self.job))
        key = open_key(folder, NODE_KEY, self.passphrase_file)

        async def act_and_say() -> None:
            async with open_account(domain, self.chain_url, key) as account:
                await work(account)
                say_act(account.result(), as_json=self.as_json)

        run(act_and_say)
