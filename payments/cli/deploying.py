"""`ledger deploy`: create a ledger on a chain by a coordinator's key."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.crypto import IdentityKey
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from hypergpu.ledger_terms import ZERO_ADDRESS
from hypergpu.user.client.settings import resolve_settings
from hypergpu.user.terminal.output import confirm, note, say, say_json
from payments.cli.account import ContractCall, Wallet
from payments.cli.keys import COORDINATOR_KEY, folder_named, open_key
from payments.cli.service import run
from payments.shell.chains import NONE, ChainProfile, named_chain, profile_of_id
from payments.shell.ethereum import Ethereum, created_address, ledger_contract
from payments.shell.ledger_choice import LedgerOptions

WINDOW_S_LEAST = 30
_DAY_S = 86_400
_SECONDS_MOST = 2**32 - 1
_QUORUM_MOST = 255


class Deployed(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="hypergpu/deployed/2"
):
    """A new ledger; its options are views of the contract."""

    ledger: str
    chain_id: int
    coordinator: str
    block: int


class DeployOrder(NamedTuple):
    """Options of a new ledger as the operator gave them."""

    token: Address
    window_s: int | None
    unbonding_s: int | None
    arbiters: tuple[Address, ...]
    quorum: int | None
    treasury: Address | None

    def options(self, own: Address, profile: ChainProfile) -> LedgerOptions:
        """Complete options."""
        window_s = profile.window_s if self.window_s is None else self.window_s
        arbiters = self.arbiters or (own,)
        options = LedgerOptions(
            token=self.token,
            window_s=window_s,
            unbonding_s=max(window_s, _DAY_S) if self.unbonding_s is None else self.unbonding_s,
            quorum=len(arbiters) // 2 + 1 if self.quorum is None else self.quorum,
            treasury=self.treasury or own,
            arbiters=arbiters,
        )
        if faults := _option_faults(options):
            detail = "; ".join(faults)
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix="correct these options")
        return options


def _option_faults(options: LedgerOptions) -> list[str]:
    """Everything that the ledger would refuse."""
    least, most = WINDOW_S_LEAST, _SECONDS_MOST
    quorum_most = min(len(options.arbiters), _QUORUM_MOST)
    faults = {
        f"--window is from {least} to {most} s": least <= options.window_s <= most,
        f"--unbonding is from the window, {options.window_s}, to {most} s": (
            options.window_s <= options.unbonding_s <= most
        ),
        f"--quorum is from 1 to {quorum_most}": 1 <= options.quorum <= quorum_most,
        "an --arbiter is named twice": len(set(options.arbiters)) == len(options.arbiters),
        "an --arbiter or the --treasury is the zero address": (
            ZERO_ADDRESS not in {*options.arbiters, options.treasury}
        ),
    }
    return [text for text, is_right in faults.items() if not is_right]


def deploy_ledger(
    order: DeployOrder,
    chain: tuple[str, str],
    whose: tuple[Path | None, Path | None],
    *,
    yes: bool,
    as_json: bool,
) -> None:
    """Create a ledger and print how a coordinator is told of it.

    Args:
        order: Its options.
        chain: Chain and RPC as given; empty: the settings'.
        whose: The coordinator's folder and passphrase file; None: the usual ones.
        yes: Whether the operator agreed beforehand.
        as_json: Whether to print JSON.
    """
    key = open_key(folder_named("data_dir", whose[0]), COORDINATOR_KEY, whose[1])
    deployment = run(lambda: _create_ledger(order, chain, key, yes=yes))
    if as_json:
        say_json(deployment)
        return
    say(f"ledger {deployment.ledger} on chain {deployment.chain_id}, in block {deployment.block}")
    say(f"let the coordinator use it: HYPERGPU_COORDINATOR_LEDGER_CONTRACT={deployment.ledger}")


async def _create_ledger(
    order: DeployOrder, named: tuple[str, str], key: IdentityKey, *, yes: bool
) -> Deployed:
    chain, profile = await _open_chain(*named)
    try:
        options = order.options(key.address, profile)
        final_s = profile.depth * profile.block_ms // 1000
        if options.window_s < final_s:
            note(f"the window of {options.window_s} s ends before payments are final: {final_s} s")
        if tuple(options.arbiters) == (key.address,):
            note("the coordinator is the only arbiter: nobody else can void what it pays")
        confirm(f"create a ledger on chain {profile.chain_id} by {key.address}?", yes=yes)
        if not await chain.code(options.token):
            detail = f"there is no contract at the token's address {options.token}"
            fix = "name an ERC-20: --token ADDRESS"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
        ledger = created_address(key.address, await chain.next_nonce(key.address))
        call = ContractCall(ledger_contract(), None, options.creation_data())
        block = await Wallet(chain, key).send(call)
    finally:
        await chain.close()
    return Deployed(ledger=ledger, chain_id=profile.chain_id, coordinator=key.address, block=block)


async def _open_chain(chain: str, chain_url: str) -> tuple[Ethereum, ChainProfile]:
    settings = resolve_settings({"chain": chain, "chain_url": chain_url})
    name, url = settings["chain"].value, settings["chain_url"].value
    if name == NONE:
        detail = "no chain is named"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix="name it: --chain CHAIN")
    stated_chain = named_chain(name, url)
    if stated_chain and not stated_chain.url:
        detail = f"the chain {name} is started by its coordinator, which deploys the ledger itself"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix="name its RPC: --chain-url URL")
    connection = Ethereum(stated_chain.url if stated_chain else name)
    profile, _ = profile_of_id(await connection.chain_id())
    if stated_chain and stated_chain.profile.chain_id != profile.chain_id:
        detail = f"the RPC is of chain {profile.chain_id}, not of {stated_chain.profile.chain_id}"
        raise HyperGPUError(Reason.CHAIN_WRONG, detail)
    return connection, stated_chain.profile if stated_chain else profile
