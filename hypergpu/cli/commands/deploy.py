"""`hypergpu ledger key` and `hypergpu ledger deploy`: what a coordinator needs on a chain first."""

from typing import Annotated

import typer

from hypergpu.terminal.options import (
    AsJson,
    DataDir,
    NoConfirmation,
    OperatorsPassphraseFile,
)

_Chain = Annotated[
    str,
    typer.Option(
        "--chain", help="A name, a profile's file or its RPC's address; else the setting chain."
    ),
]
_ChainUrl = Annotated[
    str,
    typer.Option("--chain-url", help="RPC of the chain; else the setting chain_url."),
]


def key(
    *,
    chain: _Chain = "",
    chain_url: _ChainUrl = "",
    data_dir: DataDir = None,
    passphrase_file: OperatorsPassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the address of this machine's coordinator, whose key is made where there is none."""
    from hypergpu.cli.deployment.ground import Place
    from hypergpu.cli.deployment.running import show_key

    show_key(Place(data_dir, passphrase_file, chain, chain_url), as_json=as_json)


def deploy(  # noqa: PLR0913 - each is an option
    *,
    token: Annotated[str, typer.Option(metavar="ADDRESS", help="The ERC-20 that it pays in.")],
    minimum_bond: Annotated[
        int, typer.Option(min=0, help="What a coordinator must post, in smallest units.")
    ],
    window: Annotated[
        int | None,
        typer.Option(min=0, help="Challenge window in seconds; else the usual one of the chain."),
    ] = None,
    unbonding: Annotated[
        int | None,
        typer.Option(min=0, help="Seconds; else a day, or the window where that is longer."),
    ] = None,
    arbiter: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Repeatable; else the coordinator alone."),
    ] = None,
    quorum: Annotated[
        int | None, typer.Option(min=1, help="How many arbiters decide; else more than half.")
    ] = None,
    treasury: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Gets penalties; else the coordinator.")
    ] = "",
    guardian: Annotated[
        str, typer.Option(metavar="ADDRESS", help="May pause new work; else the coordinator.")
    ] = "",
    chain: _Chain = "",
    chain_url: _ChainUrl = "",
    data_dir: DataDir = None,
    passphrase_file: OperatorsPassphraseFile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it takes, and what is lacking.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Another one, although one is there.")
    ] = False,
    yes: NoConfirmation = False,
    as_json: AsJson = False,
) -> None:
    """Make a ledger on a chain that is there, by the key of this machine's coordinator."""
    from hypergpu.cli.deployment.ground import Place
    from hypergpu.cli.deployment.options import Given
    from hypergpu.cli.deployment.running import Manner
    from hypergpu.cli.deployment.running import deploy as run

    given = Given(
        token=token,
        minimum_bond=minimum_bond,
        window_s=window,
        unbonding_s=unbonding,
        quorum=quorum,
        treasury=treasury,
        guardian=guardian,
        arbiters=tuple(arbiter or ()),
    )
    manner = Manner(is_dry=dry_run, is_again=again, yes=yes, as_json=as_json)
    run(Place(data_dir, passphrase_file, chain, chain_url), given, manner)
