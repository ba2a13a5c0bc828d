"""One account on one ledger: what it asks and what it sends, each once it is in a block."""

from collections.abc import Callable, Sequence
from functools import cached_property

from msgspec.structs import replace

from hypergpu.chain.ledger import LedgerCalls
from hypergpu.chain.local.anvil import CHAIN_ID as LOCAL_CHAIN_ID
from hypergpu.chain.profiles.named import profile_of
from hypergpu.chain.recognition import recognised
from hypergpu.chain.rpc.answers import octets
from hypergpu.chain.rpc.chain import EvmChain, Reception, Sent
from hypergpu.chain.rpc.client import Call
from hypergpu.chain.rpc.errors import RpcRefusedError
from hypergpu.chain.sent.included import included
from hypergpu.chain.signer import Draft, Signer
from hypergpu.cli.ledger.account import shown
from hypergpu.cli.ledger.acts.refused import refusal
from hypergpu.cli.ledger.reading import token_decimals
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, NodeId
from hypergpu.ledger.typed import Domain, address_bytes
from hypergpu.signature import IdentityKey

GAS = 400_000
"""More than any of these takes by Ethereum's prices."""
_FEE_TIMES = 2
_LOCAL_WEI = 10**18
_FUND = "send it some of the chain's currency"


class AccountOnChain:
    """One key's account. Whatever it sends, it has asked first whether the ledger takes it."""

    def __init__(self, chain: EvmChain, key: IdentityKey, domain: Domain) -> None:
        """See that the ledger is the one that was meant.

        Raises:
            HyperGPUError: CHAIN_WRONG, the RPC is of another chain; LEDGER_WRONG, the ledger is not
                there, or another version's.
            RpcError: the chain cannot be asked.
        """
        recognised(chain, domain)
        self._chain = chain
        self._signer = Signer(key)
        self.domain = domain
        self._contract = address_bytes(domain.contract)
        self._profile, _ = profile_of(domain.chain_id)
        self.calls = LedgerCalls()

    @property
    def owner(self) -> NodeId:
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
            HyperGPUError: ARGUMENT_INVALID, the ledger refuses to say.
        """
        (answer,) = self.asked_each(name, [arguments])
        return answer

    def asked_each(self, name: str, arguments: Sequence[tuple[object, ...]]) -> list[bytes]:
        """The same of several arguments, in one request if it fits."""
        calls = [self.calls.abi.call(name, *each) for each in arguments]
        answers = []
        for answer in self._chain.reads(self._contract, calls):
            if isinstance(answer, RpcRefusedError):
                raise refusal(self.calls, name, answer)
            answers.append(answer)
        return answers

    def foreseen(self, call: bytes, what: str, to: bytes = b"") -> bytes:
        """What a call would give in the newest block. Nothing is sent.

        Args:
            call: Function and values.
            what: It is for.
            to: The contract; empty: the ledger.

        Raises:
            HyperGPUError: ARGUMENT_INVALID, the contract would refuse it.
        """
        asked = {
            "from": self.owner,
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
            HyperGPUError: the ledger refuses it, or it gets into no block.
        """
        return self._sent(self._contract, call, what)

    def acted_each(
        self, calls: Sequence[bytes], what: str, report: Callable[[int, int], object]
    ) -> list[str]:
        """Send calls to the ledger, one behind the other, as many at a time as the pool holds.

        Args:
            calls: Each may need the ones before it.
            what: They are for.
            report: Is told how many are in a block, and how many there are.

        Returns:
            The transactions' hashes, once all are in blocks.

        Raises:
            HyperGPUError: as `acted`; what is in a block by then stays.
        """
        hashes: list[str] = []
        for start in range(0, len(calls), self._profile.in_flight_max):
            part = calls[start : start + self._profile.in_flight_max]
            self._fill()
            self.foreseen(part[0], what)
            first = self._draft(self._contract, part[0])
            sent = []
            for place, call in enumerate(part):
                draft = replace(first, nonce=first.nonce + place, call=call)
                sent.append(self._handed_in(draft, what))
            for name in sent:
                hashes.append(self._mined(name, what))
                report(len(hashes), len(calls))
        return hashes

    def provided(self, amount: int) -> list[str]:
        """Let the ledger take an amount; on a local chain the play money is made first.

        Raises:
            HyperGPUError: ARGUMENT_INVALID, the account has less of the token.
        """
        token, hashes = address_bytes(self.token), []
        lacking = amount - self._of_token("balanceOf", self.address)
        if lacking > 0:
            if self.domain.chain_id != LOCAL_CHAIN_ID:
                detail = (
                    f"{self.owner} has {self.shown(amount - lacking)} of the ledger's token"
                    f" {self.token}, {self.shown(amount)} is wanted"
                )
                fix = f"send it {self.shown(lacking)} more of that token"
                raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
            minted = self.calls.mint(Address(self.owner), lacking)
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
            HyperGPUError: ARGUMENT_INVALID, the contract refuses it; CHAIN_WRONG, the account has
                nothing to pay gas with; CHAIN_UNREACHABLE, it gets into no block.
        """
        self._fill()
        self.foreseen(call, what, to)
        return self._mined(self._handed_in(self._draft(to, call), what), what)

    def _draft(self, to: bytes, call: bytes) -> Draft:
        """The account's next transaction, at what the chain takes now."""
        head = self._chain.head()
        tip_wei = max(self._chain.tip_wei(), self._profile.tip_wei)
        return Draft(
            chain_id=self.domain.chain_id,
            nonce=self._chain.next_nonce(self.address),
            to=to,
            call=call,
            gas=GAS * self._profile.gas_percent // 100,
            max_fee_wei=_FEE_TIMES * head.base_fee_wei + tip_wei,
            tip_wei=tip_wei,
        )

    def _handed_in(self, draft: Draft, what: str) -> bytes:
        """Send one transaction: its hash, once the chain has taken it.

        Raises:
            HyperGPUError: CHAIN_WRONG or CHAIN_UNREACHABLE, it does not.
        """
        name, (reception, words) = self._handed_over(draft, what)
        if reception is Reception.UNFUNDED:
            detail = f"{self.owner} cannot pay the gas of {what}: {words}"
            raise HyperGPUError(Reason.CHAIN_WRONG, detail, fix=_FUND)
        if reception not in {Reception.TAKEN, Reception.KNOWN}:
            detail = f"the chain does not take {what}: {words}"
            fix = f"wait until what {self.owner} sent before is in a block, then run it again"
            raise HyperGPUError(Reason.CHAIN_UNREACHABLE, detail, fix=fix)
        return name

    def _handed_over(self, draft: Draft, what: str) -> tuple[bytes, Sent]:
        """Sign a transaction and send it: its hash, and how the chain took it."""
        signed = self._signer.sign(draft)
        (sent,) = self._chain.send([signed])
        return signed.hash, sent

    def _mined(self, sent: bytes, what: str) -> str:
        fix = "wait for it, then run the command again: it does only what is left"
        found = included(self._chain, self._profile, [sent], fix=fix)
        name = f"0x{sent.hex()}"
        if not found.is_success:
            detail = f"{what} failed in {name}"
            fix = "run it again: it says what is wrong now"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
        return name

    def _fill(self) -> None:
        """See that the account can pay for gas; a local chain gives it play money."""
        if self._chain.balance_wei(self.address):
            return
        if self.domain.chain_id != LOCAL_CHAIN_ID:
            detail = f"{self.owner} has nothing to pay gas with on chain {self.domain.chain_id}"
            raise HyperGPUError(Reason.CHAIN_WRONG, detail, fix=_FUND)
        self._chain.rpc.call(Call("anvil_setBalance", (self.owner, hex(_LOCAL_WEI))))
