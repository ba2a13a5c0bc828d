"""The ledger that a coordinator settles on, checked before it is used.

Local chains get one of their own. Elsewhere the operator names one, or deploys one with
`hypergpu ledger deploy`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from hypergpu.ledger_terms import Domain, address_bytes
from payments.shell.chains import ChainProfile
from payments.shell.ethereum import (
    ContractView,
    Ethereum,
    created_address,
    ledger_contract,
    token_contract,
)
from payments.shell.signing import DEPLOY_GAS, LedgerAddresses, Payload
from payments.shell.transactions import UnsignedTransaction

NAME, VERSION = "HyperGPU", "2"
TOKEN_PURPOSE, LEDGER_PURPOSE, MINT_PURPOSE = "deploy/token", "deploy/ledger", "deploy/mint"
LOCAL_WEI = 10**24
_LOCAL_TOKENS = 2**95
"""Test tokens that the coordinator gives itself: more than jobs can ask for."""
_MINT_GAS = 100_000


class LedgerOptions(NamedTuple):
    """What a ledger is made with; it never changes."""

    token: Address
    window_s: int
    unbonding_s: int
    quorum: int
    treasury: Address
    arbiters: Sequence[Address]

    def creation_data(self) -> bytes:
        """Data of the transaction that creates the ledger."""
        return ledger_contract().encode_creation(
            (
                *(self.token, self.window_s, self.unbonding_s, self.quorum, self.treasury),
                list(self.arbiters),
            )
        )


def plan_local_deployment(
    account: Address, first_nonce: int, profile: ChainProfile
) -> tuple[LedgerAddresses, list[UnsignedTransaction]]:
    """Token, ledger and play money, for the account's next nonces, in order; and their addresses.

    The account is treasury and the one arbiter: play money needs no quorum.
    """
    token = created_address(account, first_nonce)
    ledger = created_address(account, first_nonce + 1)
    window_s = profile.window_s
    options = LedgerOptions(token, window_s, window_s, 1, account, [account])
    mint = token_contract().encode("mint", account, _LOCAL_TOKENS)
    payloads = {
        TOKEN_PURPOSE: Payload(b"", token_contract().encode_creation(), DEPLOY_GAS),
        LEDGER_PURPOSE: Payload(b"", options.creation_data(), DEPLOY_GAS),
        MINT_PURPOSE: Payload(address_bytes(token), mint, _MINT_GAS),
    }
    transactions = [
        UnsignedTransaction(purpose, None, None, each) for purpose, each in payloads.items()
    ]
    return LedgerAddresses(ledger, token), transactions


async def check_chain(chain: Ethereum, profile: ChainProfile) -> None:
    """See that the RPC is of the profile's chain.

    Raises:
        HyperGPUError: CHAIN_WRONG, it is of another one.
        ChainUnreachableError: It does not answer.
    """
    chain_id = await chain.chain_id()
    if chain_id != profile.chain_id:
        raise HyperGPUError(
            Reason.CHAIN_WRONG,
            f"the RPC at {chain.where} is of chain {chain_id}, not of {profile.chain_id}",
            fix="name that chain's own RPC: HYPERGPU_COORDINATOR_CHAIN_URL=URL; or the chain:"
            " HYPERGPU_CHAIN=CHAIN",
        )


async def recognise_ledger(chain: Ethereum, domain: Domain) -> LedgerAddresses:
    """See that a contract is a ledger of this version, and ask it for its token.

    Raises:
        HyperGPUError: LEDGER_WRONG, it is not there, something else, or of another version.
        ChainUnreachableError: The RPC does not answer.
    """
    where = f"{domain.contract} on chain {domain.chain_id}"
    if not await chain.code(domain.contract):
        raise _wrong_ledger(f"there is no contract at {where}")
    domain_answer, token = await chain.read(
        [
            ContractView(ledger_contract(), domain.contract, name)
            for name in ("eip712Domain", "TOKEN")
        ]
    )
    if domain_answer is None or token is None:
        raise _wrong_ledger(f"the contract at {where} is no training ledger")
    _, name, version, chain_id, own, *_ = domain_answer
    if (name, version) != (NAME, VERSION):
        raise _wrong_ledger(f"the contract at {where} is {name} {version}, not {NAME} {VERSION}")
    if chain_id != domain.chain_id or own.lower() != domain.contract:
        raise _wrong_ledger(f"the ledger at {where} says that it is {own} on chain {chain_id}")
    return LedgerAddresses(domain.contract, Address(token.lower()))


def _wrong_ledger(detail: str) -> HyperGPUError:
    return HyperGPUError(
        Reason.LEDGER_WRONG,
        detail,
        fix="name one of this version: HYPERGPU_COORDINATOR_LEDGER_CONTRACT=ADDRESS; or deploy one:"
        " hypergpu ledger deploy",
    )
