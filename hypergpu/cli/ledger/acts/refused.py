"""A ledger's or its token's refusal as this program's own."""

from hypergpu.chain.ledger import LedgerCalls
from hypergpu.chain.moments import texts
from hypergpu.chain.rpc.errors import RpcRefusedError
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ledger.refused import meaning


def refusal(calls: LedgerCalls, what: str, refused: RpcRefusedError) -> HyperGPUError:
    """Which error it was, with its values and what mends it.

    Args:
        calls: Of the ledger.
        what: Was asked for.
        refused: By the RPC.
    """
    told = calls.abi.failure(refused.words) or calls.token.failure(refused.words)
    if told is None:
        detail = f"the ledger refuses {what}: {refused.message}"
        fix = "see that it is the ledger and the chain that were meant"
        return HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    name, values = told[0], texts(told[1])
    shown = ", ".join(f"{each} {text}" for each, text in values.items())
    detail = f"the ledger refuses {what}: {name}({shown})"
    found = meaning(name, values)
    fix = "see docs/pay/settling.md" if found is None else found.fix
    return HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
