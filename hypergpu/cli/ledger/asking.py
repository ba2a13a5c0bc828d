"""Which RPC of a chain is asked where a command names none."""

from hypergpu.chain.profiles import NONE
from hypergpu.chain.profiles.named import NAMED_BY, asked_chain_id, named_chain, profile_of
from hypergpu.cli.ledger.account import ledger_view
from hypergpu.client import connect
from hypergpu.client.settings import chain_meant, resolve_settings
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ledger.typed import Domain


def nodes_rpc(given: str, ledger: Domain, job_id: str) -> str:
    """That of the ledger's chain: as named, or public, or what this machine's coordinator asks.

    Args:
        given: By the command; empty: nothing.
        ledger: That a job of the node counts on.
        job_id: The job.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, none is known.
    """
    profile, _ = profile_of(ledger.chain_id)
    found = given or profile.rpc_url or _of_coordinator(ledger, job_id)
    if not found:
        detail = f"no RPC of chain {ledger.chain_id} is known here"
        fix = "name one: --chain-url URL; hypergpu ledger show says which one the coordinator asks"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    return found


def operators_rpc(given: str) -> str:
    """That of the chain that this machine's coordinator is to settle on, by its settings.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, no chain is named, or one that a coordinator starts itself;
            or as `named_chain`.
    """
    setting, chain_url = chain_meant(resolve_settings({"chain_url": given}))
    if chain_url:
        return chain_url
    if setting == NONE:
        fix = f"name it: {NAMED_BY}, or --chain-url URL"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, "no chain is named", fix=fix)
    found = named_chain(setting, "", asked_chain_id)
    if not found.url:
        detail = f"the chain {setting} is started by the coordinator, which posts its bond itself"
        fix = "nothing is to be done: it is play money; else name the chain: --chain-url URL"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    return found.url


def _of_coordinator(ledger: Domain, job_id: str) -> str:
    """What a coordinator asks that this machine has a token of; empty: there is none."""
    try:
        with connect() as coordinator:
            view = ledger_view(job_id, coordinator.ledger(job_id))
    except HyperGPUError:
        return ""
    is_same = (view.chain_id, view.contract) == (ledger.chain_id, ledger.contract)
    return view.chain.url if view.chain is not None and is_same else ""
