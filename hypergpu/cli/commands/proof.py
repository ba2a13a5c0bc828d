"""`hypergpu ledger export` and `check`: what others need to check a job, and check by."""

from pathlib import Path
from typing import Annotated

import typer

from hypergpu.terminal.options import Address, AsJson, TokenFile

_OwnChain = Annotated[str, typer.Option("--chain-url", help="RPC of the chain that it names.")]


def export(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="A job's id or its beginning, or its name.")
    ],
    file: Annotated[Path, typer.Argument(help="Where its receipts go.")],
    *,
    chain_url: Annotated[
        str, typer.Option("--chain-url", help="RPC of the chain; else what the coordinator uses.")
    ] = "",
    as_json: AsJson = False,
    address: Address = None,
    token_file: TokenFile = None,
) -> None:
    """Write all receipts of a job into a file, by which anybody verifies it without you."""
    from hypergpu.cli.ledger.proof.files import exported
    from hypergpu.client import connect
    from hypergpu.terminal.output import say, say_json
    from hypergpu.units import several

    with connect(address, token_file=token_file) as coordinator:
        job_id = coordinator.find_job(job)
        made = exported(coordinator, job_id, file, chain_url)
    if as_json:
        say_json(made)
        return
    say(f"{made.file}: {several(made.receipts, 'receipt')} of {made.job}")
    url = " --chain-url URL" if made.chain_id else ""
    say(f"whoever has it checks it without you: hypergpu ledger verify --file FILE{url}")


def check(
    bundle: Annotated[Path, typer.Argument(help="What `ledger dispute` wrote, here or elsewhere.")],
    *,
    chain_url: _OwnChain = "",
    as_json: AsJson = False,
) -> None:
    """Say who is right in a dispute, by its bundle and by the chain that it names."""
    from hypergpu.cli.ledger.proof.bundle import bundle_checked, bundle_lines
    from hypergpu.errors import HyperGPUError, Reason
    from hypergpu.terminal.output import say, say_json

    found = bundle_checked(bundle, chain_url)
    if as_json:
        say_json(found)
    else:
        for line in bundle_lines(found):
            say(line)
    if found.is_right is False:
        detail = f"{bundle} does not prove that something is {found.claim}: {found.faults[0]}"
        raise HyperGPUError(Reason.SIGNATURE_INVALID, detail, fix="ask its node for another one")
