"""What the chain itself says of a job: asked of the chain, not of the coordinator."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hypergpu.chain.abi import Abi
from hypergpu.chain.artifacts import artifact
from hypergpu.chain.ledger import CONTRACT, LedgerCalls
from hypergpu.chain.profiles.named import profile_of
from hypergpu.chain.reading.history import JobReader
from hypergpu.chain.recognition import recognised
from hypergpu.chain.rpc.answers import Block, octets
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import HttpRpc
from hypergpu.chain.rpc.errors import RpcError, RpcGarbledError, RpcRefusedError
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.cli.ledger.account import Standing
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, JobKey, NodeId
from hypergpu.ledger.audit.facts import JobFact
from hypergpu.ledger.terms import Terms
from hypergpu.ledger.typed import Domain, address_bytes, word_bytes
from hypergpu.terminal.transfer import step_bar

_DECIMALS_MAX = 36


@contextmanager
def ledger_at(url: str) -> Iterator[EvmChain]:
    """A chain by its RPC, which is asked as much at a time as its profile says.

    How many calls a second it bears is assumed of a chain without a profile, since nobody knows
    whose RPC it is; one on this machine is its owner's, and asked as fast as it answers.

    Raises:
        HyperGPUError: CHAIN_UNREACHABLE, it does not answer; ARGUMENT_INVALID, that is no address.
    """
    try:
        transport = HttpTransport(url)
    except ValueError as wrong:
        fix = "name it like this: --chain-url http://127.0.0.1:8545"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, str(wrong), fix=fix) from None
    try:
        profile, assumed = profile_of(EvmChain(HttpRpc(transport)).chain_id())
        is_own = bool(assumed) and transport.is_loopback
        pace = profile.pace._replace(requests_per_s=0) if is_own else profile.pace
        yield EvmChain(HttpRpc(transport, pace))
    except RpcError as broken:
        # Most name the RPC themselves; a key in its address is said by none.
        where = "" if transport.where in str(broken) else f"{transport.where}: "
        raise HyperGPUError(Reason.CHAIN_UNREACHABLE, f"{where}{broken}") from None
    finally:
        transport.close()


def settled_on(chain: EvmChain, terms: Terms, openings: Sequence[str]) -> Domain | None:
    """The ledger that a job is settled on; None: no block has opened it on one.

    Args:
        chain: Of the coordinator.
        terms: Of the job. Where they name a ledger, it is that.
        openings: The hashes of the transaction that opened it, by the coordinator: it may have
            several, one of which is in a block.

    Raises:
        RpcError: the chain cannot be asked.
    """
    if terms.domain.chain_id:
        return terms.domain
    opened, job = Abi(artifact(CONTRACT).abi).topic("JobOpened"), word_bytes(terms.job)
    places = chain.inclusions([octets(name) for name in openings])
    for event in (event for place in places if place is not None for event in place.events):
        if event.topics[:2] == (opened, job):
            return Domain(chain.chain_id(), Address(f"0x{event.address.hex()}"))
    return None


def job_fact(chain: EvmChain, ledger: Domain, job: JobKey) -> JobFact:
    """A job's whole history, off the chain.

    Raises:
        HyperGPUError: CHAIN_WRONG or LEDGER_WRONG, the ledger is not there; JOB_UNKNOWN, it does
            not know the job.
        RpcError: the chain cannot be asked.
    """
    recognised(chain, ledger)
    with step_bar("reading the job's blocks") as report:
        return JobReader(chain, ledger, job, report).fact()


def final_block(chain: EvmChain) -> Block:
    """The newest that no reorganisation takes back, by the chain's profile.

    Raises:
        RpcError: the chain cannot be asked, or does not have it.
    """
    profile, _ = profile_of(chain.chain_id())
    number = max(0, chain.head().number - profile.depth)
    (block,) = chain.blocks([number])
    if block is None:
        raise RpcGarbledError(f"the chain's RPC at {chain.where} does not give block {number}")
    return block


def second_look(chain: EvmChain, fact: JobFact) -> JobFact:
    """The same again, at the same block, before anybody is accused by it.

    An RPC may answer by a block that it is just making, or by another machine's state. What was
    read first stands where it has forgotten how that block was.

    Raises:
        HyperGPUError: CHAIN_UNREACHABLE, the block was reorganised away meanwhile.
        RpcError: the chain cannot be asked.
    """
    (block,) = chain.blocks([fact.block])
    if block is None or block.hash.hex() != fact.block_hash:
        detail = f"block {fact.block} was reorganised away while the job was read"
        raise HyperGPUError(Reason.CHAIN_UNREACHABLE, detail, fix="run it again")
    with step_bar("reading the job's blocks once more") as report:
        try:
            return JobReader(chain, fact.domain, fact.job, report).fact(block)
        except RpcRefusedError:
            return fact


def token_decimals(chain: EvmChain, ledger: Domain) -> int:
    """Of the token that a ledger pays in; 0 where it has none.

    Raises:
        RpcError: the chain cannot be asked.
    """
    calls = LedgerCalls()
    answer = chain.read(address_bytes(ledger.contract), calls.abi.call("TOKEN"))
    (token,) = calls.abi.answer("TOKEN", answer)
    try:
        answer = chain.read(address_bytes(Address(token)), calls.token.call("decimals"))
        (decimals,) = calls.token.answer("decimals", answer)
    except (RpcRefusedError, RpcGarbledError):
        return 0
    return min(int(decimals), _DECIMALS_MAX)


def standings(
    chain: EvmChain, ledger: Domain, job: JobKey, nodes: Sequence[NodeId]
) -> dict[NodeId, Standing]:
    """What each node has of the job; nothing of one that the ledger does not know.

    Raises:
        RpcError: the chain cannot be asked.
    """
    calls, name = LedgerCalls(), word_bytes(job)
    addresses = [address_bytes(node) for node in nodes]
    asked = [calls.abi.call("getAccount", name, address) for address in addresses]
    asked += [calls.abi.call("creditOf", address) for address in addresses]
    answers = chain.reads(address_bytes(ledger.contract), asked)
    found = {}
    for node, account, credit in zip(nodes, answers, answers[len(nodes) :], strict=False):
        if isinstance(account, RpcRefusedError) or isinstance(credit, RpcRefusedError):
            found[node] = Standing()
            continue
        told = calls.account(account)
        (waiting,) = calls.abi.answer("creditOf", credit)
        found[node] = Standing(told.paid, told.pending, told.release_at_s, waiting)
    return found
