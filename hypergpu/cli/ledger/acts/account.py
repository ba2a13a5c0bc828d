"""One account on one ledger: what it asks and what it sends, each once it is in a block."""

import time
from functools import cached_property

from hypergpu.chain.ledger import LedgerCalls
from hypergpu.chain.recognition import recognised
from hypergpu.chain.rpc.answers import octets
from hypergpu.chain.rpc.chain import EvmChain, Reception
from hypergpu.chain.rpc.client import Call
from hypergpu.chain.rpc.errors import RpcRefusedError
from hypergpu.chain.signer import Draft, Signer
from hypergpu.cli.ledger.account import shown
from hypergpu.cli.ledger.acts.refused import refusal
from hypergpu.cli.ledger.reading import token_decimals
from hypergpu.ids import Address, NodeId
from hypergpu.ledger.typed import Domain, address_bytes
from hypergpu.refusal import Reason, RefusalError
from hypergpu.signature import IdentityKey

GAS = 400_000
"""More than any of these takes."""
_MINED_WITHIN_S = 90.0
_LOOK_EACH_S = 0.2
_FEE_TIMES = 2
_TIP_WEI = 10**9
_LOCAL_CHAIN_ID = 31337
_LOCAL_WEI = 10**18
_FUND = "send it some of the chain's currency"


class AccountOnChain:
    """One key's account. Whatever it sends, it has asked first whether the ledger takes it."""

    def __init__(self, chain: EvmChain, key: IdentityKey, domain: Domain) -> None:
        """See that the ledger is the one that was meant.

        Raises:
            RefusalError: CHAIN_WRONG, the RPC is of another chain; LEDGER_WRONG, the ledger is not
                there, or another version's.
            RpcError: the chain cannot be asked.
        """
        recognised(chain, domain)
        self._chain = chain
        self._signer = Signer(key)
        self.domain = domain
        self._contract = address_bytes(domain.contract)
        self.calls = LedgerCalls()

    @property
    def node(self) -> NodeId:
        """Whose account it is."""
        return self._signer.node_id

    @property
    def address(self) -> bytes:
        """The same, as contracts have it."""
        return self._signer.address

    @property
    def now_s(self) -> int:
        """The chain's own clock."""
        return self._chain.head().time_s

    @cached_property
    def token(self) -> Address:
        """In which the ledger pays."""
        (token,) = self.calls.abi.answer("TOKEN", self.asked("TOKEN"))
        return Address(token)

    def shown(self, amount: int) -> str:
        """An amount of the token with its decimals."""
        return shown(str(amount), self._decimals)

    def number(self, name: str, *arguments: object) -> int:
        """The one number that a function of the ledger gives."""
        (value,) = self.calls.abi.answer(name, self.asked(name, *arguments))
        return int(value)

    def asked(self, name: str, *arguments: object) -> bytes:
        """What a function of the ledger gives that changes nothing.

        Raises:
            RefusalError: ARGUMENT_INVALID, the ledger refuses to say.
        """
        try:
            return self._chain.read(self._contract, self.calls.abi.call(name, *arguments))
        except RpcRefusedError as refused:
            raise refusal(self.calls, name, refused) from None

    def foreseen(self, call: bytes, what: str, to: bytes = b"") -> bytes:
        """What a call would give in the newest block. Nothing is sent.

        Args:
            call: Function and values.
            what: It is for.
            to: The contract; empty: the ledger.

        Raises:
            RefusalError: ARGUMENT_INVALID, the contract would refuse it.
        """
        asked = {
            "from": self.node,
            "to": f"0x{(to or self._contract).hex()}",
            "data": f"0x{call.hex()}",
        }
        try:
            return octets(self._chain.rpc.call(Call("eth_call", (asked, "latest"))))
        except RpcRefusedError as refused:
            raise refusal(self.calls, what, refused) from None

    def acted(self, call: bytes, what: str) -> str:
        """Send a call to the ledger.

        Returns:
            The transaction's hash, once it is in a block.

        Raises:
            RefusalError: the ledger refuses it, or it gets into no block.
        """
        return self._sent(self._contract, call, what)

    def provided(self, amount: int) -> list[str]:
        """Let the ledger take an amount; on a local chain the play money is made first.

        Raises:
            RefusalError: ARGUMENT_INVALID, the account has less of the token.
        """
        token, hashes = address_bytes(self.token), []
        lacking = amount - self._of_token("balanceOf", self.address)
        if lacking > 0:
            if self.domain.chain_id != _LOCAL_CHAIN_ID:
                detail = (
                    f"{self.node} has {self.shown(amount - lacking)} of the ledger's token"
                    f" {self.token}, {self.shown(amount)} is wanted"
                )
                fix = f"send it {self.shown(lacking)} more of that token"
                raise RefusalError(Reason.ARGUMENT_INVALID, detail, fix=fix)
            minted = self.calls.mint(Address(self.node), lacking)
            hashes.append(self._sent(token, minted.call, "mint"))
        if self._of_token("allowance", self.address, self._contract) < amount:
            approval = self.calls.approve(self.domain.contract, amount)
            hashes.append(self._sent(token, approval.call, "approve"))
        return hashes

    @cached_property
    def _decimals(self) -> int:
        return token_decimals(self._chain, self.domain)

    def _of_token(self, name: str, *arguments: object) -> int:
        answer = self._chain.read(
            address_bytes(self.token), self.calls.token.call(name, *arguments)
        )
        (value,) = self.calls.token.answer(name, answer)
        return int(value)

    def _sent(self, to: bytes, call: bytes, what: str) -> str:
        """Send one transaction and wait until it is in a block.

        Raises:
            RefusalError: ARGUMENT_INVALID, the contract refuses it; CHAIN_WRONG, the account has
                nothing to pay gas with; CHAIN_UNREACHABLE, it gets into no block.
        """
        self._fill()
        self.foreseen(call, what, to)
        head = self._chain.head()
        draft = Draft(
            chain_id=self.domain.chain_id,
            nonce=self._chain.next_nonce(self.address),
            to=to,
            call=call,
            gas=GAS,
            max_fee_wei=_FEE_TIMES * head.base_fee_wei + _TIP_WEI,
            tip_wei=_TIP_WEI,
        )
        signed = self._signer.sign(draft)
        ((reception, words),) = self._chain.send([(signed.hash, signed.raw)])
        if reception is Reception.UNFUNDED:
            detail = f"{self.node} cannot pay the gas of {what}: {words}"
            raise RefusalError(Reason.CHAIN_WRONG, detail, fix=_FUND)
        if reception not in {Reception.TAKEN, Reception.KNOWN}:
            detail = f"the chain does not take {what}: {words}"
            fix = f"wait until what {self.node} sent before is in a block, then run it again"
            raise RefusalError(Reason.CHAIN_UNREACHABLE, detail, fix=fix)
        return self._mined(signed.hash, what)

    def _mined(self, sent: bytes, what: str) -> str:
        deadline_s = time.monotonic() + _MINED_WITHIN_S
        name = f"0x{sent.hex()}"
        while time.monotonic() < deadline_s:
            (found,) = self._chain.inclusions([sent])
            if found is not None:
                if not found.is_success:
                    detail = f"{what} failed in {name}"
                    fix = "run it again: it says what is wrong now"
                    raise RefusalError(Reason.ARGUMENT_INVALID, detail, fix=fix)
                return name
            time.sleep(_LOOK_EACH_S)
        detail = f"{what} ({name}) is in no block after {_MINED_WITHIN_S:g} s"
        fix = "wait for it, then run the command again: it does only what is left"
        raise RefusalError(Reason.CHAIN_UNREACHABLE, detail, fix=fix)

    def _fill(self) -> None:
        """See that the account can pay for gas; a local chain gives it play money."""
        if self._chain.balance_wei(self.address):
            return
        if self.domain.chain_id != _LOCAL_CHAIN_ID:
            detail = f"{self.node} has nothing to pay gas with on chain {self.domain.chain_id}"
            raise RefusalError(Reason.CHAIN_WRONG, detail, fix=_FUND)
        self._chain.rpc.call(Call("anvil_setBalance", (self.node, hex(_LOCAL_WEI))))
