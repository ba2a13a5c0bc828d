"""`hypergpu ledger ...`."""

from typing import TYPE_CHECKING, Annotated

import typer

from hypergpu.cli.commands.app import group
from hypergpu.cli.commands.options import Address, AsJson, JobName, TokenFile

if TYPE_CHECKING:
    from hypergpu.cli.remote.calls import Coordinator

app = group("See what jobs owe their nodes, and check it.")
Decimals = Annotated[
    int,
    typer.Option("--decimals", min=0, max=36, help="Of the token: amounts are shown with them."),
]


def _found(coordinator: "Coordinator", job: str | None) -> str:
    from hypergpu.cli.remote.naming import job_named

    return job_named(coordinator.jobs(), job)


@app.command()
def show(
    job: JobName = None,
    *,
    decimals: Decimals = 6,
    as_json: AsJson = False,
    address: Address = None,
    token_file: TokenFile = None,
) -> None:
    """Show what a job owes each node: contributions, quality, earned, vouched for."""
    from hypergpu.cli.ledger.showing import ledger_of, say_ledger
    from hypergpu.cli.output import say_json
    from hypergpu.cli.remote.calls import connect

    with connect(address, token_file) as coordinator:
        view = ledger_of(coordinator, _found(coordinator, job))
    if as_json:
        say_json(view)
    else:
        say_ledger(view, decimals)


@app.command()
def verify(
    job: JobName = None,
    *,
    chain_url: Annotated[
        str, typer.Option("--chain-url", help="RPC of the chain; else what the coordinator uses.")
    ] = "",
    as_json: AsJson = False,
    address: Address = None,
    token_file: TokenFile = None,
) -> None:
    """Check every receipt of a job, and that accounts and chain follow from them."""
    from hypergpu.cli.ledger.showing import verification_of
    from hypergpu.cli.ledger.verifying import verdict_lines
    from hypergpu.cli.output import say, say_json
    from hypergpu.cli.remote.calls import connect
    from hypergpu.refusal import Reason, RefusalError

    with connect(address, token_file) as coordinator:
        job_id = _found(coordinator, job)
        found = verification_of(coordinator, job_id, chain_url)
    if as_json:
        say_json(found)
    else:
        for line in verdict_lines(found):
            say(line)
    if not found.is_sound:
        detail = f"{job_id}: {len(found.faults)} things are wrong with its receipts or its pay"
        raise RefusalError(Reason.SIGNATURE_INVALID, detail, fix="show them to its nodes")
