"""What the chain itself says of a job: asked of the chain, not of the coordinator."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hypergpu.chain.history import JobReader
from hypergpu.chain.ledger import LedgerCalls
from hypergpu.chain.recognition import recognised
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import HttpRpc
from hypergpu.chain.rpc.errors import RpcError, RpcRefusedError
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.ids import NodeId
from hypergpu.ledger.audit.facts import JobFact
from hypergpu.ledger.terms import Terms
from hypergpu.ledger.typed import address_bytes, word_bytes
from hypergpu.refusal import Reason, RefusalError


@contextmanager
def ledger_at(url: str) -> Iterator[EvmChain]:
    """A chain by its RPC.

    Raises:
        RefusalError: CHAIN_UNREACHABLE, it does not answer; ARGUMENT_INVALID, that is no address.
    """
    try:
        rpc = HttpRpc(HttpTransport(url))
    except ValueError as wrong:
        fix = "name it like this: --chain-url http://127.0.0.1:8545"
        raise RefusalError(Reason.ARGUMENT_INVALID, f"{url!r}: {wrong}", fix=fix) from None
    try:
        yield EvmChain(rpc)
    except RpcError as broken:
        raise RefusalError(Reason.CHAIN_UNREACHABLE, f"{url}: {broken}") from broken
    finally:
        rpc.close()


def job_fact(url: str, terms: Terms) -> JobFact:
    """A job's whole history, off the chain.

    Raises:
        RefusalError: CHAIN_UNREACHABLE, the chain does not answer; CHAIN_WRONG or LEDGER_WRONG, it
            is not where the job counts; JOB_UNKNOWN, its ledger does not know the job.
    """
    with ledger_at(url) as chain:
        recognised(chain, terms.domain)
        return JobReader(chain, terms.domain).fact(terms.job)


def paid_nodes(chain: EvmChain, terms: Terms, nodes: Sequence[NodeId]) -> dict[NodeId, int]:
    """What each node was paid for the job so far; 0 of one that the ledger does not know.

    Raises:
        RpcError: the chain cannot be asked.
    """
    calls, job = LedgerCalls(), word_bytes(terms.job)
    asked = [calls.abi.call("getAccount", job, address_bytes(node)) for node in nodes]
    answers = chain.reads(address_bytes(terms.domain.contract), asked)
    return {
        node: 0 if isinstance(answer, RpcRefusedError) else calls.account(answer).paid
        for node, answer in zip(nodes, answers, strict=True)
    }
