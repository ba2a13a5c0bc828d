"""The town's actions, done to the contract on a local chain."""

from collections.abc import Callable
from typing import Any

from eth_account import Account
from eth_account.messages import encode_typed_data

from hypergpu.chain.abi import Abi
from hypergpu.chain.artifacts import artifact
from hypergpu.chain.local.anvil import CHAIN_ID
from hypergpu.chain.rpc.client import Call, HttpRpc
from hypergpu.ids import Address
from hypergpu.keys.keccak import keccak
from hypergpu.ledger.packing import batch_totals, packed
from hypergpu.ledger.typed import Domain, Receipt, chain_form, sign
from hypergpu.signature import IdentityKey
from tests.properties.ledger.town import (
    COORDINATOR,
    ESCROW,
    JOB,
    JOB_ID,
    NODES,
    OPTIONS,
    OWNER,
    PEOPLE,
    PURSE,
    TERMS,
    TREASURY,
    Action,
    Town,
    equivocal,
    forced,
    payees,
    person,
    second_id,
    together,
    voucher,
)

ADMIN = person("admin")
ARBITERS = sorted((person("arbiter 0"), person("arbiter 1")), key=lambda key: key.node_id)
LEDGER_ABI = Abi(artifact("TrainingLedger").abi)
TOKEN_ABI = Abi(artifact("TestToken").abi)
JOB_BYTES = bytes.fromhex(JOB)
NOTHING = bytes(32)
FOREVER = 2**256 - 1
GAS = hex(15_000_000)
ON_CHAIN = (
    TERMS.coordinator,
    NOTHING,
    NOTHING,
    TERMS.epochs,
    TERMS.unit_price,
    TERMS.guaranteed_bps,
    TERMS.spend_limit,
)
VERDICT = "bytes32 job,uint32 epoch,address node,uint128 penalty,bytes32 evidence"
VOUCHER_VERDICT = "bytes32 job,address node,bytes32 evidence"
Sending = tuple[IdentityKey, str, tuple[Any, ...]]


class RevertedOnChainError(Exception):
    """A transaction that reverted, with its error's name."""


class ContractTown:
    """A ledger, its token and the people, on a chain that mines when it is asked to."""

    def __init__(self, rpc: HttpRpc, now_s: int) -> None:
        """Deploy everything, and begin as `Town` does."""
        self.rpc = rpc
        self.now_s = now_s
        everybody = [key.address for key in (*PEOPLE, ADMIN)]
        self.rpc.batch(
            [Call("anvil_autoImpersonateAccount", (True,))]
            + [Call("anvil_setBalance", (one, hex(10**24))) for one in everybody]
        )
        self.token = self._deployed("TestToken", TOKEN_ABI.constructor())
        options = (
            self.token,
            OPTIONS.window_s,
            OPTIONS.unbonding_s,
            OPTIONS.minimum_bond,
            OPTIONS.quorum,
            TREASURY.address,
            ADMIN.address,
            [arbiter.address for arbiter in ARBITERS],
        )
        self.ledger = self._deployed("TrainingLedger", LEDGER_ABI.constructor(options))
        self.domain = Domain(CHAIN_ID, self.ledger)
        for one in PEOPLE:
            self._send(one, self.token, TOKEN_ABI.call("mint", one.address, PURSE))
            self._send(one, self.token, TOKEN_ABI.call("approve", self.ledger, FOREVER))
        self.tell(COORDINATOR, "postBond", 1_500)
        self.tell(COORDINATOR, "allowOwner", OWNER.address, True)
        self.tell(OWNER, "openJob", keccak(JOB_ID.encode()), ON_CHAIN, ESCROW)
        for node in NODES[:2]:
            self.tell(node, "registerNode", NOTHING, 20_000)

    def tell(self, caller: IdentityKey, name: str, *values: object) -> None:
        """Call the ledger in a block of its own, at `now_s`.

        Raises:
            RevertedOnChainError: it reverted.
        """
        self._send(caller, self.ledger, LEDGER_ABI.call(name, *values))

    def do(self, town: Town, action: Action) -> None:
        """Do an action; the model of before it says what the coordinator knows.

        Raises:
            RevertedOnChainError: the ledger reverted.
        """
        if action.name not in {"work", "wait"}:
            caller, name, values = self.sending(town, action)
            self.tell(caller, name, *values)

    def sending(self, town: Town, action: Action) -> Sending:
        """Who calls what for an action."""
        if action.name in MONEY:
            return PEOPLE[action.who], *MONEY[action.name](action)
        return CALLS[action.name](self, town, action)

    def batch(self, town: Town, action: Action) -> Sending:
        chosen, root = town.batch(action)
        seq = town.ledger.job(JOB).next_seq - (action.name == "aggregate_again")
        if seq < 0:
            seq = 2**32 - 1
        where = (JOB_BYTES, action.epoch, seq, root)
        if action.name == "packed":
            return COORDINATOR, "submitContributions", (*where, packed(together(chosen)))
        totals = [
            (one.node, one.first_sequence, one.receipts, one.samples, one.score)
            for one in batch_totals(together(chosen))
        ]
        return COORDINATOR, "submitAggregate", (*where, totals)

    def agreed(self, kind: str, fields: str, body: tuple[Any, ...]) -> list[bytes]:
        """What the arbiters sign, by a wallet's encoder."""
        declared = [field.split() for field in fields.split(",")]
        message = dict(zip((name for _, name in declared), body, strict=True))
        typed = encode_typed_data(
            {
                "name": "HyperGPU",
                "version": "1",
                "chainId": CHAIN_ID,
                "verifyingContract": self.ledger,
            },
            {kind: [{"name": name, "type": type_} for type_, name in declared]},
            message,
        )
        return [Account.sign_message(typed, one.secret).signature for one in ARBITERS]

    def pass_time(self) -> None:
        """Mine an empty block, so that answers are those of a moment after `now_s`."""
        self.now_s += 1
        moment = Call("evm_setNextBlockTimestamp", (self.now_s,))
        self.rpc.batch([moment, Call("evm_mine")])

    def differences(self, town: Town) -> dict[str, tuple[object, object]]:
        """Where the contract and the model say different things of the same."""
        expected = modelled(town)
        calls = [
            Call("eth_call", ({"to": to, "data": "0x" + body.hex()}, "latest"))
            for to, body in (self._question(key) for key in expected)
        ]
        found = {}
        for key, answer in zip(expected, self.rpc.batch(calls), strict=True):
            abi = TOKEN_ABI if key[0] == "balanceOf" else LEDGER_ABI
            values = abi.answer(key[0], bytes.fromhex(str(answer)[2:]))
            found[key] = flat(values)
        return {
            " ".join(map(str, key)): (found[key], told)
            for key, told in expected.items()
            if picked(key[0], found[key]) != told
        }

    def _question(self, key: tuple[Any, ...]) -> tuple[Address, bytes]:
        name, *values = key
        if name == "balanceOf":
            holder = self.ledger if values == ["the ledger"] else values[0]
            return self.token, TOKEN_ABI.call(name, holder)
        return self.ledger, LEDGER_ABI.call(name, *values)

    def _deployed(self, name: str, arguments: bytes) -> Address:
        code = artifact(name).code + arguments
        receipt = self._mined({"from": ADMIN.address, "data": "0x" + code.hex(), "gas": GAS})
        assert receipt["status"] == "0x1", f"{name} was not deployed: {receipt}"
        return Address(str(receipt["contractAddress"]))

    def _send(self, caller: IdentityKey, to: Address, body: bytes) -> None:
        receipt = self._mined(
            {"from": caller.address, "to": to, "data": "0x" + body.hex(), "gas": GAS}
        )
        if receipt["status"] != "0x1":
            tracing = Call(
                "debug_traceTransaction", (receipt["transactionHash"], {"tracer": "callTracer"})
            )
            trace: Any = self.rpc.call(tracing)
            raise RevertedOnChainError(error_name(bytes.fromhex(trace.get("output", "0x")[2:])))

    def _mined(self, transaction: dict[str, str]) -> dict[str, Any]:
        self.now_s += 1
        sent = self.rpc.batch(
            [
                Call("eth_sendTransaction", (transaction,)),
                Call("evm_setNextBlockTimestamp", (self.now_s,)),
                Call("evm_mine"),
            ]
        )
        receipt: Any = self.rpc.call(Call("eth_getTransactionReceipt", (sent[0],)))
        return dict(receipt)


def force(_: ContractTown, town: Town, action: Action) -> Sending:
    signed = forced(town, action)
    signatures = (chain_form(signed.contribution_signature), chain_form(signed.signature))
    values = (as_tuple(signed.receipt), *signatures, action.epoch)
    return PEOPLE[action.who], "submitContribution", values


def redeem(self: ContractTown, town: Town, action: Action) -> Sending:
    promised = voucher(town, action)
    signature = chain_form(sign(COORDINATOR, self.domain.separator(), promised))
    body = (JOB_BYTES, promised.node, promised.sequence, promised.amount)
    return PEOPLE[action.who], "redeemVoucher", (body, signature)


def void(self: ContractTown, town: Town, action: Action) -> Sending:
    body = (JOB_BYTES, action.epoch, town.node(action).address, action.amount, NOTHING)
    agreed = self.agreed("Verdict", VERDICT, body)
    return PEOPLE[action.who], "voidContribution", (body, agreed)


def bar(self: ContractTown, town: Town, action: Action) -> Sending:
    body = (JOB_BYTES, town.node(action).address, NOTHING)
    agreed = self.agreed("VoucherVerdict", VOUCHER_VERDICT, body)
    return PEOPLE[action.who], "voidVoucher", (body, agreed)


def equivocate(_: ContractTown, town: Town, action: Action) -> Sending:
    values = tuple(
        part
        for signed in equivocal(town, action)
        for part in (as_tuple(signed.receipt), chain_form(signed.signature))
    )
    return PEOPLE[action.who], "proveEquivocation", values


def of_epoch(name: str) -> "Callable[[ContractTown, Town, Action], Sending]":
    def sending(_: ContractTown, __: Town, action: Action) -> Sending:
        values = (JOB_BYTES, action.epoch, payees(action))
        return PEOPLE[action.who], name, values[: 2 if name == "closeEpoch" else 3]

    return sending


def pausing(_: ContractTown, __: Town, action: Action) -> Sending:
    return ADMIN, action.name, ()


def allow(_: ContractTown, town: Town, action: Action) -> Sending:
    values = (town.node(action).address, action.name == "allow")
    return PEOPLE[action.who], "allowOwner", values


def release(_: ContractTown, town: Town, action: Action) -> Sending:
    return PEOPLE[action.who], "releaseVoucher", (JOB_BYTES, town.node(action).address)


CALLS: "dict[str, Callable[[ContractTown, Town, Action], Sending]]" = {
    "aggregate": ContractTown.batch,
    "aggregate_again": ContractTown.batch,
    "packed": ContractTown.batch,
    "force": force,
    "close": of_epoch("closeEpoch"),
    "pay": of_epoch("distributePayments"),
    "sweep": of_epoch("sweepDust"),
    "redeem": redeem,
    "release": release,
    "void": void,
    "bar": bar,
    "equivocate": equivocate,
    "allow": allow,
    "disallow": allow,
    "pause": pausing,
    "unpause": pausing,
}
MONEY: dict[str, Any] = {
    "stake": lambda action: ("stake", (action.amount,)),
    "unstake": lambda action: ("unstake", (action.amount,)),
    "take_stake": lambda _: ("withdrawStake", ()),
    "fund": lambda action: ("fund", (JOB_BYTES, action.amount)),
    "limit": lambda action: ("raiseSpendLimit", (JOB_BYTES, action.amount)),
    "announce": lambda _: ("requestReclaim", (JOB_BYTES,)),
    "reclaim": lambda _: ("reclaim", (JOB_BYTES,)),
    "open": lambda action: ("openJob", (keccak(second_id(action).encode()), ON_CHAIN, 0)),
    "retire": lambda _: ("retireJob", (JOB_BYTES,)),
    "unbond": lambda _: ("unbond", ()),
    "take_bond": lambda _: ("withdrawBond", ()),
    "bond": lambda action: ("postBond", (action.amount,)),
}


def as_tuple(receipt: Receipt) -> tuple[Any, ...]:
    """A receipt as call data has it."""
    return (
        bytes.fromhex(receipt.job),
        receipt.epoch,
        receipt.round,
        receipt.node,
        receipt.sequence,
        bytes.fromhex(receipt.contribution),
        receipt.samples,
        receipt.quality_bps,
        bytes.fromhex(receipt.evaluator),
    )


def modelled(town: Town) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """What the contract should answer to each question."""
    ledger, state, job = town.ledger, town.ledger.state, town.ledger.job(JOB)
    told: dict[tuple[Any, ...], tuple[Any, ...]] = {
        ("digestOf", JOB_BYTES): (job.digest,),
        ("getJob", JOB_BYTES): (job.free, ledger.spendable(job), job.next_seq, job.ends_at_s),
    }
    for one in (*PEOPLE, TREASURY):
        told["balanceOf", one.address] = (state.balances.get(one.address, 0),)
        told["creditOf", one.address] = (state.credit.get(one.address, 0),)
    held = sum(state.balances.values()) - sum(
        state.balances.get(one.address, 0) for one in (*PEOPLE, TREASURY)
    )
    told["balanceOf", "the ledger"] = (held,)
    for one in PEOPLE:
        stake, bond = ledger.stake_of(one.address), ledger._bond(one.address)
        told["stakeOf", one.address] = (
            stake.staked,
            stake.locked,
            stake.unbonding,
            stake.release_at_s,
        )
        told["bondOf", one.address] = (bond.amount, bond.jobs, bond.release_at_s)
    for number in range(3):
        epoch = ledger.epoch(JOB, number)
        told["getEpoch", JOB_BYTES, number] = (
            epoch.total_score,
            epoch.pool,
            epoch.opened_at_s,
            epoch.closed_at_s,
            epoch.is_swept,
        )
        for node in NODES:
            share = ledger.share(JOB, number, node.address)
            reward = ledger.reward(JOB, number, node.address)
            told["getContribution", JOB_BYTES, number, node.address] = (
                share.state.value,
                share.receipts,
                share.score,
                reward,
                share.paid,
            )
    for node in NODES:
        account = ledger.account(JOB, node.address)
        told["getAccount", JOB_BYTES, node.address] = (
            account.counted,
            account.samples,
            account.earned,
            account.earned + account.advance - account.pending,
            account.pending,
            account.release_at_s,
            account.voided,
            account.is_barred,
        )
    return told


def flat(values: Any) -> tuple[Any, ...]:
    """An answer's values without its structs."""
    return tuple(
        inner
        for value in values
        for inner in (flat(value) if isinstance(value, tuple | list) else (value,))
    )


def picked(name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the model knows of an answer: of a job, what changes."""
    if name != "getJob":
        return values
    *_, free, spendable, next_seq, _, ends_at_s = values
    return free, spendable, next_seq, ends_at_s


def error_name(output: bytes) -> str:
    """What a reverted call says, by the name of its error."""
    if output[:4].hex() == "4e487b71":
        return "Panic"
    words = [abi.error(output) for abi in (LEDGER_ABI, TOKEN_ABI)]
    return next((said for said in words if not said.startswith("0x")), words[0]).partition("(")[0]
