"""`hypergpu ledger`: see what jobs pay, check it, and act on a ledger without the coordinator."""

from pathlib import Path
from typing import Annotated

import typer

from hypergpu.user.terminal.commands import (
    AsJson,
    DataDir,
    NoConfirmation,
    OperatorsPassphraseFile,
    group,
    with_options,
)
from payments.cli.options import (
    ChainUrl,
    HeldJobName,
    JobAt,
    NamedJobAt,
    NodeFolder,
    NodeOptions,
    NodesPassphraseFile,
)

app = group("See what jobs owe their nodes, check it, and take it.")

_Amount = Annotated[int, typer.Argument(min=1, help="In the token's smallest unit.")]


@app.command()
@with_options(JobAt)
def show(
    at: JobAt,
    *,
    is_all: Annotated[
        bool, typer.Option("--all", help="Every transaction, not the newest alone.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a job owes each node and how much of it is allotted and paid."""
    from hypergpu.user.terminal.output import say_json
    from payments.cli.service import open_job, run
    from payments.cli.show import NEWEST_TRANSACTIONS, say_ledger

    async def work() -> None:
        async with open_job(at) as (coordinator, job_id):
            job_ledger = await coordinator.ledger(job_id)
        if as_json:
            say_json(job_ledger)
        else:
            say_ledger(job_ledger, None if is_all else NEWEST_TRANSACTIONS)

    run(work)


@app.command()
@with_options(JobAt)
def verify(
    at: JobAt,
    *,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="Written by `ledger export`: no coordinator is asked."),
    ] = None,
    is_offline: Annotated[
        bool, typer.Option("--offline", help="Check the receipts alone, and ask no chain.")
    ] = False,
    chain_url: ChainUrl = "",
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="ENGINE",
            help="Who checks signatures: local, ray or ray://HOST:10001; else this process:"
            " docs/engine.md.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check every receipt of a job, and that the ledger's records follow from them."""
    from payments.cli.service import check_job, say_verified

    if file is not None and at.job is not None:
        raise typer.BadParameter("a file names its job itself")
    verification = check_job(at, file, chain_url, is_offline=is_offline, engine=engine)
    say_verified(verification, as_json=as_json)


@app.command()
@with_options(JobAt)
def export(
    at: JobAt,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write.")],
) -> None:
    """Write all receipts of a job to a file, which anybody can verify."""
    from hypergpu.errors import HyperGPUError, Reason
    from hypergpu.user.terminal.output import say
    from payments.cli.service import read_receipts, run
    from payments.core.verify import encode_file

    file = run(lambda: read_receipts(at))
    try:
        out.write_bytes(encode_file(file))
    except OSError as error:
        detail = f"{out} cannot be written: {error.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error
    say(f"{out}: {len(file.receipts)} receipts of {file.job_id}")


@app.command()
def claim(
    job: HeldJobName = None,
    *,
    to: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Payee of credit that the node cannot receive.")
    ] = "",
    chain_url: ChainUrl = "",
    state_dir: NodeFolder = None,
    passphrase_file: NodesPassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Take what jobs owe this machine's node, by its newest receipts and without a coordinator."""
    from hypergpu.user.terminal.output import note, say_json
    from payments.cli.account import account_address, open_account
    from payments.cli.acts import claim_job
    from payments.cli.held_jobs import held_jobs
    from payments.cli.keys import NODE_KEY, device_folders, folder_named, open_key
    from payments.cli.service import run
    from payments.cli.show import Claimed, say_act

    payee = account_address(to, "--to") if to else None
    folder = folder_named("state_dir", state_dir)
    for device in device_folders(folder):
        note(f"another device is paid for itself: hypergpu ledger claim --state-dir {device}")
    jobs = held_jobs(folder, job)
    key = open_key(folder, NODE_KEY, passphrase_file)

    async def work() -> None:
        acts = []
        for each in jobs:
            async with open_account(each.terms.domain, chain_url, key) as account:
                await claim_job(account, each, payee)
                acts.append(account.result())
        if as_json:
            say_json(Claimed(acts=acts))
            return
        for act in acts:
            say_act(act, as_json=False)

    run(work)


@app.command()
@with_options(NodeOptions)
def register(
    node: NodeOptions,
    *,
    stake_amount: Annotated[
        int, typer.Option("--stake", min=0, help="In the token's smallest unit.")
    ] = 0,
) -> None:
    """Register this machine's node on the ledger of its jobs, with stake if it is named."""
    from payments.cli.acts import act_as_node, register_node
    from payments.cli.keys import folder_named

    folder = folder_named("state_dir", node.state_dir)
    act_as_node(node, lambda account: register_node(account, folder, stake_amount))


@app.command()
@with_options(NodeOptions)
def stake(
    node: NodeOptions,
    amount: _Amount,
) -> None:
    """Add to the stake of this machine's node: shares up to it are paid at once."""
    from payments.cli.acts import act_as_node, add_stake

    act_as_node(node, lambda account: add_stake(account, amount))


@app.command()
@with_options(NodeOptions)
def unstake(
    node: NodeOptions,
    amount: Annotated[
        str, typer.Argument(metavar="AMOUNT|all", help="In the token's smallest unit.")
    ] = "all",
) -> None:
    """Ask for stake back; run it again once its wait is over to take it."""
    from payments.cli.acts import act_as_node, take_stake_back

    if amount != "all" and not (amount.isascii() and amount.isdecimal() and int(amount)):
        raise typer.BadParameter(f"{amount} is neither a whole number above 0 nor: all")
    asked_amount = None if amount == "all" else int(amount)
    act_as_node(node, lambda account: take_stake_back(account, asked_amount))


@app.command()
@with_options(JobAt)
def void(  # noqa: PLR0913 - each is an option
    at: JobAt,
    *,
    node: Annotated[str, typer.Option("--node", metavar="ADDRESS", help="Whose share.")],
    epoch: Annotated[int, typer.Option("--epoch", min=0, max=2**32 - 1)],
    evidence: Annotated[
        Path, typer.Option("--evidence", help="Document that says why; its digest is recorded.")
    ],
    penalty: Annotated[
        int, typer.Option("--penalty", min=0, help="Most that its free stake loses on top.")
    ] = 0,
    key: Annotated[
        list[Path] | None,
        typer.Option("--key", metavar="FILE", help="An arbiter's keystore; the first one sends."),
    ] = None,
    key_passphrase_file: Annotated[
        Path | None, typer.Option("--key-passphrase-file", help="Opens the keystores.")
    ] = None,
    signature: Annotated[
        list[str] | None,
        typer.Option("--signature", metavar="HEX", help="Another arbiter's, by --sign-only."),
    ] = None,
    sign_only: Annotated[
        bool, typer.Option("--sign-only", help="Print this arbiter's signature and send nothing.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option("--file", help="Of `ledger export`: no coordinator is asked.")
    ] = None,
    chain_url: ChainUrl = "",
    yes: NoConfirmation = False,
    as_json: AsJson = False,
) -> None:
    """As arbiters, void a node's share inside its challenge window and slash its stake."""
    from payments.cli.account import account_address
    from payments.cli.acts import VoidOrder, void_share

    if not key or key_passphrase_file is None:
        raise typer.BadParameter(
            "name an arbiter's keystore and its passphrase: --key, --key-passphrase-file"
        )
    order = VoidOrder(
        node=account_address(node, "--node"),
        epoch=epoch,
        penalty=penalty,
        evidence=evidence,
        keys=tuple(key),
        passphrase_file=key_passphrase_file,
        signatures=tuple(signature or ()),
        is_signed_only=sign_only,
    )
    void_share(order, (at, file), chain_url, yes=yes, as_json=as_json)


@app.command()
@with_options(NamedJobAt)
def reclaim(
    at: NamedJobAt,
    *,
    yes: NoConfirmation = False,
    as_json: AsJson = False,
) -> None:
    """Announce a job's end on its ledger; run it again after the wait to take its free escrow."""
    from payments.cli.service import reclaim_job

    reclaim_job(at, yes=yes, as_json=as_json)


@app.command()
@with_options(NamedJobAt)
def retry(at: NamedJobAt) -> None:
    """Clear a job's halt once its cause is mended: what failed is tried again."""
    from hypergpu.user.terminal.output import say
    from payments.cli.service import open_job, run

    async def work() -> None:
        async with open_job(at) as (coordinator, job_id):
            purposes = await coordinator.retry_halted(job_id)
        say(f"tried again: {', '.join(purposes)}" if purposes else f"{at.job} is not halted")

    run(work)


@app.command()
def deploy(  # noqa: PLR0913 - each is an option
    *,
    token: Annotated[str, typer.Option(metavar="ADDRESS", help="The ERC-20 that it pays in.")],
    window: Annotated[
        int | None, typer.Option(help="Challenge window in seconds; else the chain's usual one.")
    ] = None,
    unbonding: Annotated[
        int | None, typer.Option(help="Seconds; else a day, or the window if that is longer.")
    ] = None,
    arbiter: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Repeatable; else the coordinator alone."),
    ] = None,
    quorum: Annotated[
        int | None, typer.Option(help="Arbiters that a verdict needs; else more than half.")
    ] = None,
    treasury: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Gets penalties; else the coordinator.")
    ] = "",
    chain: Annotated[
        str, typer.Option("--chain", help="Name, profile file or RPC address; else the setting.")
    ] = "",
    chain_url: ChainUrl = "",
    data_dir: DataDir = None,
    passphrase_file: OperatorsPassphraseFile = None,
    yes: NoConfirmation = False,
    as_json: AsJson = False,
) -> None:
    """Create a ledger by the key of this machine's coordinator, which must not settle meanwhile."""
    from payments.cli.account import account_address
    from payments.cli.deploying import DeployOrder, deploy_ledger

    order = DeployOrder(
        token=account_address(token, "--token"),
        window_s=window,
        unbonding_s=unbonding,
        arbiters=tuple(account_address(each, "--arbiter") for each in arbiter or ()),
        quorum=quorum,
        treasury=account_address(treasury, "--treasury") if treasury else None,
    )
    deploy_ledger(order, (chain, chain_url), (data_dir, passphrase_file), yes=yes, as_json=as_json)
