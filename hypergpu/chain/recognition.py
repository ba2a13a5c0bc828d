"""Whether a contract is the ledger that it is taken for, asked of its chain before it is trusted.

A call to an address without code succeeds and does nothing: who does not ask takes that for work.
"""

from hypergpu.chain.abi import Abi
from hypergpu.chain.artifacts import artifact
from hypergpu.chain.ledger import CONTRACT
from hypergpu.chain.rpc.chain import EvmChain, is_of_contract
from hypergpu.chain.rpc.errors import RpcGarbledError, RpcRefusedError
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ledger.typed import Domain, address_bytes

NAME, VERSION = "HyperGPU", "1"


def recognised(chain: EvmChain, domain: Domain, block: bytes | None = None) -> bytes:
    """The code of the ledger that statements of this domain are for.

    Args:
        chain: To be asked.
        domain: The ledger's.
        block: Hash of the block that it is asked at; None: the newest.

    Raises:
        HyperGPUError: CHAIN_WRONG, the RPC is of another chain; LEDGER_WRONG, the contract is not
            there, is something else, or of another version.
        RpcError: the chain cannot be asked.
    """
    found = chain.chain_id()
    if found != domain.chain_id:
        detail = f"the RPC at {chain.where} is of chain {found}, not of {domain.chain_id}"
        raise HyperGPUError(Reason.CHAIN_WRONG, detail)
    where = f"{domain.contract} on chain {domain.chain_id}"
    contract = address_bytes(domain.contract)
    code = chain.code(contract, block)
    if not code:
        raise HyperGPUError(Reason.LEDGER_WRONG, f"there is no contract at {where}")
    abi = Abi(artifact(CONTRACT).abi)
    try:
        answer = chain.read(contract, abi.call("eip712Domain"), block)
        _, name, version, chain_id, own, *_ = abi.answer("eip712Domain", answer)
    except (RpcRefusedError, RpcGarbledError) as broken:
        if isinstance(broken, RpcRefusedError) and not is_of_contract(broken):
            raise
        detail = f"the contract at {where} is no training ledger"
        raise HyperGPUError(Reason.LEDGER_WRONG, detail) from None
    if (name, version) != (NAME, VERSION):
        detail = f"the contract at {where} is {name} {version}, this is for {NAME} {VERSION}"
        raise HyperGPUError(Reason.LEDGER_WRONG, detail)
    if chain_id != domain.chain_id or address_bytes(own) != contract:
        raise HyperGPUError(Reason.LEDGER_WRONG, f"the ledger at {where} says that it is {own}")
    return code
