"""`hypergpu ledger ...`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hypergpu.terminal.commands import group
from hypergpu.terminal.options import (
    Address,
    AsJson,
    DataDir,
    JobName,
    NoConfirmation,
    OperatorsPassphraseFile,
    TokenFile,
)

if TYPE_CHECKING:
    from hypergpu.client import Coordinator

_ChainOfJob = Annotated[
    str, typer.Option("--chain-url", help="RPC of the chain; else what the coordinator uses.")
]
app = group("See what jobs owe their nodes, and check it.")
Decimals = Annotated[
    int | None,
    typer.Option("--decimals", min=0, max=36, help="To show amounts with; else the token's."),
]


def _found(coordinator: "Coordinator", job: str | None) -> str:
    return coordinator.find_job(job)


@app.command()
def show(  # noqa: PLR0913 - each is an option
    job: JobName = None,
    *,
    chain_url: _ChainOfJob = "",
    is_all: Annotated[
        bool, typer.Option("--all", help="Every transaction, not the newest alone.")
    ] = False,
    decimals: Decimals = None,
    as_json: AsJson = False,
    address: Address = None,
    token_file: TokenFile = None,
) -> None:
    """Show what a job owes each node, and how far its pay is: promised, recorded, paid, final."""
    from hypergpu.cli.ledger.showing import Listed, ledger_of, say_ledger
    from hypergpu.client import connect
    from hypergpu.terminal.output import say_json

    with connect(address, token_file=token_file) as coordinator:
        view = ledger_of(coordinator, _found(coordinator, job), chain_url)
    if as_json:
        say_json(view)
    else:
        say_ledger(view, decimals, Listed(len(view.transactions), "") if is_all else None)


@app.command()
def verify(
    job: JobName = None,
    *,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="Of `ledger export`: no coordinator is asked then."),
    ] = None,
    chain_url: _ChainOfJob = "",
    as_json: AsJson = False,
    address: Address = None,
    token_file: TokenFile = None,
) -> None:
    """Check every receipt of a job or a file, and that accounts and chain follow from them."""
    from hypergpu.cli.ledger.proof.files import verified_file
    from hypergpu.cli.ledger.showing import verification_of
    from hypergpu.cli.ledger.verifying import verdict_lines
    from hypergpu.client import connect
    from hypergpu.errors import HyperGPUError, Reason
    from hypergpu.terminal.output import say, say_json
    from hypergpu.units import several

    if file is not None:
        if job is not None:
            raise typer.BadParameter("a file names its job itself")
        found = verified_file(file, chain_url)
    else:
        with connect(address, token_file=token_file) as coordinator:
            found = verification_of(coordinator, _found(coordinator, job), chain_url)
    if as_json:
        say_json(found)
    else:
        for line in verdict_lines(found):
            say(line)
    if not found.is_sound:
        wrong = several(len(found.faults), "fault")
        detail = f"{found.job}: {wrong} in its receipts or its pay"
        raise HyperGPUError(Reason.SIGNATURE_INVALID, detail, fix="show them to its nodes")


def _amount_or_all(given: str) -> int | None:
    if given == "all":
        return None
    if not given.isascii() or not given.isdecimal() or not int(given):
        raise typer.BadParameter(f"{given} is neither a whole number above 0 nor: all")
    return int(given)


_StateDir = Annotated[
    Path | None, typer.Option("--state-dir", help="The node's key and what it holds.")
]
_PassphraseFile = Annotated[
    Path | None,
    typer.Option("--passphrase-file", help="Opens the key; else the file beside its folder."),
]
_Chain = Annotated[
    str,
    typer.Option("--chain-url", help="RPC of the chain; else a public one, or the coordinator's."),
]
_Ledger = Annotated[
    str,
    typer.Option(
        "--ledger-contract",
        metavar="ADDRESS",
        help="That settles the job, where it was signed for none; else as the coordinator says.",
    ),
]
_Held = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB", help="Its id or the beginning of it; else the only one of the wallet."
    ),
]


@app.command()
def register(  # noqa: PLR0913 - each is an option
    job: _Held = None,
    *,
    chain_url: _Chain = "",
    ledger_contract: _Ledger = "",
    stake_amount: Annotated[int, typer.Option("--stake", min=0, help="In smallest units.")] = 0,
    state_dir: _StateDir = None,
    passphrase_file: _PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Register this machine's node on the ledger of its jobs, with a stake if one is named."""
    from hypergpu.cli.ledger.acts.meant import Where
    from hypergpu.cli.ledger.errand import on_ledger

    on_ledger(
        lambda node: node.register(stake_amount),
        whose=(state_dir, passphrase_file, job),
        where=Where(chain_url, ledger_contract),
        as_json=as_json,
    )


@app.command()
def stake(  # noqa: PLR0913 - each is an option
    amount: Annotated[int, typer.Argument(min=1, help="In the token's smallest unit.")],
    job: _Held = None,
    *,
    chain_url: _Chain = "",
    ledger_contract: _Ledger = "",
    state_dir: _StateDir = None,
    passphrase_file: _PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Add to the stake of this machine's node: its shares are paid at once as far as it covers."""
    from hypergpu.cli.ledger.acts.meant import Where
    from hypergpu.cli.ledger.errand import on_ledger

    on_ledger(
        lambda node: node.stake(amount),
        whose=(state_dir, passphrase_file, job),
        where=Where(chain_url, ledger_contract),
        as_json=as_json,
    )


@app.command()
def unstake(  # noqa: PLR0913 - each is an option
    amount: Annotated[
        str, typer.Argument(metavar="AMOUNT|all", help="In the token's smallest unit.")
    ],
    job: _Held = None,
    *,
    chain_url: _Chain = "",
    ledger_contract: _Ledger = "",
    state_dir: _StateDir = None,
    passphrase_file: _PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Ask for stake back; run again once its wait is over, it is taken."""
    from hypergpu.cli.ledger.acts.meant import Where
    from hypergpu.cli.ledger.errand import on_ledger

    wanted = _amount_or_all(amount)
    on_ledger(
        lambda node: node.unstake(wanted),
        whose=(state_dir, passphrase_file, job),
        where=Where(chain_url, ledger_contract),
        as_json=as_json,
    )


@app.command()
def claim(  # noqa: PLR0913 - each is an option
    job: _Held = None,
    *,
    chain_url: _Chain = "",
    ledger_contract: _Ledger = "",
    to: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="For what the token refused to transfer before."),
    ] = None,
    state_dir: _StateDir = None,
    passphrase_file: _PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Take what a job owes this machine's node, and redeem its voucher: without a coordinator."""
    from hypergpu.cli.ledger.acts.meant import Where
    from hypergpu.cli.ledger.errand import claim_job

    whose = (state_dir, passphrase_file, job)
    claim_job(to, whose=whose, where=Where(chain_url, ledger_contract), as_json=as_json)


@app.command()
def dispute(
    job: _Held = None,
    *,
    chain_url: _Chain = "",
    out: Annotated[Path, typer.Option("--out", help="Folder for the bundles.")] = Path(),
    state_dir: _StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Write a bundle for each thing that this machine's node can prove was not paid rightly."""
    from hypergpu.cli.ledger.errand import disputed
    from hypergpu.client.settings import resolve_settings
    from hypergpu.terminal.output import say, say_json

    settings = resolve_settings({"state_dir": str(state_dir) if state_dir else None})
    folder = Path(settings["state_dir"].value).expanduser()
    made = disputed(folder, job, chain_url=chain_url, out=out)
    if as_json:
        say_json(made)
        return
    for file in made.files:
        say(file)
    if not made.files:
        say(f"nothing about {made.job} is to be disputed: {made.said}")


@app.command()
def enforce(
    bundle: Annotated[Path, typer.Argument(help="What `ledger dispute` wrote, here or elsewhere.")],
    *,
    chain_url: _Chain = "",
    state_dir: _StateDir = None,
    passphrase_file: _PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Record what a bundle shows was left out, or show what was signed twice; anybody may."""
    from hypergpu.cli.ledger.errand import enforce_bundle

    enforce_bundle(
        bundle,
        whose=(state_dir, passphrase_file, None),
        chain_url=chain_url,
        as_json=as_json,
    )


_OperatorsChain = Annotated[
    str,
    typer.Option(
        "--chain-url",
        help="RPC of the chain; else the setting chain_url, or that of the setting chain.",
    ),
]
_Contract = Annotated[
    str,
    typer.Option(
        "--ledger-contract",
        metavar="ADDRESS",
        envvar="HYPERGPU_COORDINATOR_LEDGER_CONTRACT",
        help="The ledger's.",
    ),
]


@app.command()
def bond(
    amount: Annotated[
        int | None,
        typer.Argument(min=1, help="In the token's smallest unit; else what the ledger asks for."),
    ] = None,
    *,
    chain_url: _OperatorsChain = "",
    ledger_contract: _Contract,
    data_dir: DataDir = None,
    passphrase_file: OperatorsPassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """See that this machine's coordinator has its bond, without which a ledger opens no job."""
    from hypergpu.cli.ledger.errand import as_operator

    as_operator(
        lambda operator: operator.bond(amount),
        whose=(data_dir, passphrase_file, ledger_contract),
        chain_url=chain_url,
        as_json=as_json,
    )


@app.command()
def unbond(
    *,
    chain_url: _OperatorsChain = "",
    ledger_contract: _Contract,
    data_dir: DataDir = None,
    passphrase_file: OperatorsPassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Ask for the coordinator's bond back; run again once its wait is over, it is taken."""
    from hypergpu.cli.ledger.errand import as_operator

    as_operator(
        lambda operator: operator.unbond(),
        whose=(data_dir, passphrase_file, ledger_contract),
        chain_url=chain_url,
        as_json=as_json,
    )


@app.command()
def reclaim(  # noqa: PLR0913 - each is an option
    job: Annotated[str, typer.Argument(metavar="JOB", help="Its id or the beginning of it.")],
    *,
    chain_url: _OperatorsChain = "",
    ledger_contract: _Contract,
    yes: NoConfirmation = False,
    data_dir: DataDir = None,
    passphrase_file: OperatorsPassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """End a job on the ledger; run again once its wait is over, its free escrow is taken."""
    from hypergpu.cli.ledger.errand import as_operator
    from hypergpu.terminal.output import confirm

    as_operator(
        lambda operator: operator.reclaim(job, lambda question: confirm(question, yes=yes)),
        whose=(data_dir, passphrase_file, ledger_contract),
        chain_url=chain_url,
        as_json=as_json,
    )
