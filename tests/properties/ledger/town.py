"""A small town around one job: its people, what they may do, and the model that it is done to.

Actions are plain data, so that the same ones can be done to the contract.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hypothesis import strategies as st
from msgspec.structs import replace

from hypergpu.digest import digest_of
from hypergpu.ids import Address, JobId, Keccak, NodeId
from hypergpu.keys.keccak import keccak
from hypergpu.ledger.audit.facts import (
    AccountFact,
    BatchFact,
    EpochFact,
    ForcedFact,
    Form,
    JobFact,
    ShareFact,
)
from hypergpu.ledger.merkle import MerkleTree
from hypergpu.ledger.packing import batch_totals, packed, totals_words
from hypergpu.ledger.receipt import SignedReceipt, leaf
from hypergpu.ledger.settlement.ledger import TrainingLedger
from hypergpu.ledger.settlement.state import Account, JobTerms, Options
from hypergpu.ledger.typed import (
    Contribution,
    Domain,
    Receipt,
    Voucher,
    job_key,
    keccak_of,
    sign,
    struct_hash,
)
from hypergpu.ledger.voucher import SignedVoucher
from hypergpu.signature import IdentityKey
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples, Wei


def person(name: str) -> IdentityKey:
    return IdentityKey(keccak(name.encode()))


COORDINATOR, OWNER, STRANGER, TREASURY = map(person, ("coordinator", "owner", "stranger", "purse"))
NODES = tuple(sorted((person(f"node {n}") for n in range(3)), key=lambda key: key.node_id))
PEOPLE = (COORDINATOR, OWNER, STRANGER, *NODES)
WINDOW_S, UNBONDING_S = 60, 120
OPTIONS = Options(
    window_s=WINDOW_S,
    unbonding_s=UNBONDING_S,
    minimum_bond=1_000,
    quorum=2,
    treasury=TREASURY.address,
)
PURSE = 10**12
JOB_ID = JobId("job-0123456789ab")
JOB = job_key(OWNER.address, JOB_ID)
TERMS = JobTerms(coordinator=COORDINATOR.address, unit_price=211, spend_limit=40_000, epochs=3)
ESCROW = 90_000


class Action(NamedTuple):
    """What somebody does. Which of the fields count depends on its name."""

    name: str
    who: int = 0
    epoch: int = 0
    amount: int = 0
    several: tuple[int, ...] = ()


people, epochs = st.integers(0, len(PEOPLE) - 1), st.integers(0, 2)
nodes = st.integers(0, len(NODES) - 1)
amounts = st.one_of(st.integers(0, 50_000), st.sampled_from([0, 1, 10**7]))
some_nodes = st.lists(nodes, max_size=4).map(tuple)
ascending_nodes = st.sampled_from([(0, 1, 2), (0, 1), (1, 2), (0,), (2, 1), (1, 1), ()])
likely = st.sampled_from(
    ["work"] * 6 + ["aggregate", "packed"] * 3 + ["close", "pay"] * 3 + ["wait"] * 2
)
RARE = (
    "force sweep redeem redeem release void bar stake stake unstake take_stake fund limit announce"
    " reclaim retire unbond take_bond bond allow disallow open pause unpause equivocate"
    " aggregate_again"
)
rare = st.sampled_from(RARE.split())
actions = st.builds(
    Action,
    name=st.one_of(likely, likely, rare),
    who=people,
    epoch=epochs,
    amount=amounts,
    several=st.one_of(some_nodes, ascending_nodes),
)


class Town:
    """The model with its people, and the receipts that the coordinator has signed."""

    def __init__(self, now_s: int, domain: Domain) -> None:
        self.ledger = TrainingLedger(OPTIONS, now_s)
        self.domain = domain
        self.separator = domain.separator()
        self.receipts: list[SignedReceipt] = []
        self.batches: list[BatchFact] = []
        self.forced: list[ForcedFact] = []
        self.vouchers: list[SignedVoucher] = []
        self.deposited = ESCROW
        self.reclaimed = 0
        for one in PEOPLE:
            self.ledger.state.balances[one.address] = PURSE
        self.ledger.post_bond(COORDINATOR.address, 1_500)
        self.ledger.allow_owner(COORDINATOR.address, OWNER.address)
        self.ledger.open_job(OWNER.address, JOB, TERMS, ESCROW)
        for node in NODES[:2]:
            self.ledger.register_node(node.address, 20_000)

    def node(self, action: Action) -> IdentityKey:
        return NODES[action.who % len(NODES)]

    def issued(self, node: IdentityKey) -> list[SignedReceipt]:
        return [one for one in self.receipts if one.receipt.node == node.node_id]

    def work(self, action: Action) -> None:
        """A node works and gets its receipt; nothing happens on the chain."""
        node = self.node(action)
        sequence = len(self.issued(node))
        self.receipts.append(self.signed(node, sequence, action))

    def signed(self, node: IdentityKey, sequence: int, action: Action) -> SignedReceipt:
        samples = Samples(action.amount % 4_096)
        contribution = Contribution(
            job=JOB,
            epoch=action.epoch,
            round=sequence,
            node=node.node_id,
            shard=digest_of(b"shard"),
            model=digest_of(b"model"),
            update=digest_of(f"{node.node_id} {sequence}".encode()),
            samples=samples,
            inner_steps=1,
            compute_ms=Milliseconds(1),
            update_bytes=Bytes(1),
            lease=sequence,
            nonce=sequence,
        )
        receipt = Receipt(
            job=JOB,
            epoch=action.epoch,
            round=sequence,
            node=node.node_id,
            sequence=sequence,
            contribution=Keccak(struct_hash(contribution).hex()),
            samples=samples,
            quality_bps=BasisPoints(action.amount * 31 % 10_001),
            evaluator=keccak_of("quality/1 agreement"),
        )
        return SignedReceipt(
            receipt=receipt,
            signature=sign(COORDINATOR, self.separator, receipt),
            contribution=contribution,
            contribution_signature=sign(node, self.separator, contribution),
        )

    def batch(self, action: Action) -> tuple[list[Receipt], bytes]:
        """What the coordinator puts into its next batch, and the root.

        It knows what is counted, but may be a block behind: then it starts one receipt early.
        """
        early = action.amount % 5 == 0
        chosen: list[Receipt] = []
        for number in sorted({place % len(NODES) for place in action.several} or {0, 1, 2}):
            node = NODES[number]
            counted = self.ledger.account(JOB, node.address).counted
            first = max(0, counted - 1) if early else counted
            run = [
                one.receipt
                for one in self.issued(node)[first:]
                if one.receipt.epoch <= action.epoch
            ]
            dense = [one for place, one in enumerate(run) if one.sequence == first + place]
            chosen += dense
        return chosen, MerkleTree(map(leaf, chosen)).root if chosen else bytes(32)

    def skipped(self, chosen: Sequence[Receipt]) -> tuple[NodeId, ...]:
        """Nodes that an aggregate of these would leave out."""
        return tuple(
            one.node
            for one in batch_totals(together(chosen))
            if one.first_sequence != self.ledger.account(JOB, Address(one.node)).counted
        )

    def note(
        self,
        action: Action,
        form: Form,
        root: bytes,
        content: bytes,
        skipped: tuple[NodeId, ...],
    ) -> None:
        """Keep what the chain's events say of a batch."""
        fact = BatchFact(
            seq=len(self.batches),
            epoch=action.epoch,
            root=root,
            digest=self.ledger.job(JOB).digest,
            form=form,
            content=content,
            skipped=skipped,
        )
        self.batches.append(fact)

    def fact(self) -> JobFact:
        """What the chain says, as an auditor reads it."""
        ledger, state, job = self.ledger, self.ledger.state, self.ledger.job(JOB)
        return JobFact(
            job=JOB,
            domain=self.domain,
            coordinator=COORDINATOR.address,
            unit_price=Wei(TERMS.unit_price),
            deposited=Wei(self.deposited),
            free=Wei(job.free),
            reclaimed=Wei(self.reclaimed),
            digest=job.digest,
            time_s=ledger.now_s,
            window_s=OPTIONS.window_s,
            unbonding_s=OPTIONS.unbonding_s,
            batches=tuple(self.batches),
            forced=tuple(self.forced),
            epochs=tuple(
                EpochFact(
                    number=number,
                    total_score=one.total_score,
                    pool=Wei(one.pool),
                    is_swept=one.is_swept,
                    opened_at_s=one.opened_at_s,
                    closed_at_s=one.closed_at_s,
                )
                for (_, number), one in sorted(state.epochs.items())
                if one.closed_at_s
            ),
            shares=tuple(
                ShareFact(
                    epoch=number,
                    node=NodeId(node),
                    state=one.state,
                    score=one.score,
                    reward=Wei(ledger.reward(JOB, number, node)),
                    paid=Wei(one.paid),
                )
                for (_, number, node), one in sorted(state.shares.items())
                if one.receipts
            ),
            accounts=tuple(
                AccountFact(
                    node=NodeId(node),
                    counted=one.counted,
                    earned=Wei(one.earned),
                    paid=Wei(one.earned + one.advance - one.pending),
                    pending=Wei(one.pending),
                    release_at_s=one.release_at_s,
                    voided=Wei(one.voided),
                )
                for (_, node), one in sorted(state.accounts.items())
                if one != Account()
            ),
        )


def together(receipts: Sequence[Receipt]) -> list[Receipt]:
    """The same receipts, settled in one epoch whatever their own."""
    return [replace(one, epoch=0) for one in receipts]


def done(town: Town, action: Action) -> object:
    """Do an action to the model; what it returns is what the contract returns.

    Raises:
        RevertedError: the contract would revert.
    """
    return DEEDS[action.name](town, action)


def waited(town: Town, action: Action) -> None:
    town.ledger.now_s += 1 + action.amount % (WINDOW_S * 2)


def aggregated(town: Town, action: Action) -> None:
    chosen, root = town.batch(action)
    seq = town.ledger.job(JOB).next_seq - (action.name == "aggregate_again")
    totals = batch_totals(together(chosen))
    skipped = town.skipped(chosen)
    town.ledger.submit_aggregate(COORDINATOR.address, JOB, action.epoch, seq, root, totals)
    town.note(action, Form.AGGREGATE, root, totals_words(totals), skipped)


def packed_up(town: Town, action: Action) -> None:
    chosen, root = town.batch(action)
    seq = town.ledger.job(JOB).next_seq
    content = packed(together(chosen))
    town.ledger.submit_contributions(COORDINATOR.address, JOB, action.epoch, seq, root, content)
    town.note(action, Form.PACKED, root, content, ())


def funded(town: Town, action: Action) -> None:
    town.ledger.fund(who(action), JOB, action.amount)
    town.deposited += action.amount


def reclaimed(town: Town, action: Action) -> None:
    town.reclaimed += town.ledger.reclaim(who(action), JOB)


def forced_in(town: Town, action: Action) -> None:
    signed = forced(town, action)
    town.ledger.submit_contribution(signed.receipt, action.epoch)
    receipt = signed.receipt
    if receipt.sequence == len(town.issued(town.node(action))):
        town.receipts.append(signed)
    town.forced.append(ForcedFact(receipt.node, receipt.sequence, action.epoch))


def redeemed(town: Town, action: Action) -> int:
    promised = voucher(town, action)
    town.vouchers.append(SignedVoucher(promised, sign(COORDINATOR, town.separator, promised)))
    return town.ledger.redeem_voucher(who(action), promised)


def equivocated(town: Town, action: Action) -> int:
    first, second = equivocal(town, action)
    return town.ledger.prove_equivocation(who(action), first.receipt, second.receipt)


def retired(town: Town, _: Action) -> None:
    town.ledger.retire_job(JOB)


def second_id(action: Action) -> JobId:
    return JobId(f"job-{action.epoch:012x}")


def opened(town: Town, action: Action) -> None:
    town.ledger.open_job(who(action), job_key(who(action), second_id(action)), TERMS, 0)


def pausing(town: Town, action: Action) -> None:
    if action.name == "pause":
        town.ledger.pause()
    else:
        town.ledger.unpause()


def who(action: Action) -> Address:
    return PEOPLE[action.who].address


def payees(action: Action) -> list[Address]:
    return [NODES[number].address for number in action.several]


DEEDS: dict[str, Callable[[Town, Action], object]] = {
    "work": Town.work,
    "wait": waited,
    "aggregate": aggregated,
    "aggregate_again": aggregated,
    "packed": packed_up,
    "force": forced_in,
    "close": lambda town, a: town.ledger.close_epoch(who(a), JOB, a.epoch),
    "pay": lambda town, a: town.ledger.distribute_payments(JOB, a.epoch, payees(a)),
    "sweep": lambda town, a: town.ledger.sweep_dust(JOB, a.epoch, payees(a)),
    "redeem": redeemed,
    "release": lambda town, a: town.ledger.release_voucher(JOB, town.node(a).address),
    "void": lambda town, a: town.ledger.void_contribution(
        JOB, a.epoch, town.node(a).address, a.amount
    ),
    "bar": lambda town, a: town.ledger.void_voucher(JOB, town.node(a).address),
    "equivocate": equivocated,
    "stake": lambda town, a: town.ledger.stake(who(a), a.amount),
    "unstake": lambda town, a: town.ledger.unstake(who(a), a.amount),
    "take_stake": lambda town, a: town.ledger.withdraw_stake(who(a)),
    "fund": funded,
    "limit": lambda town, a: town.ledger.raise_spend_limit(who(a), JOB, a.amount),
    "announce": lambda town, a: town.ledger.request_reclaim(who(a), JOB),
    "reclaim": reclaimed,
    "retire": retired,
    "allow": lambda town, a: town.ledger.allow_owner(who(a), town.node(a).address),
    "disallow": lambda town, a: town.ledger.disallow_owner(who(a), town.node(a).address),
    "open": opened,
    "unbond": lambda town, a: town.ledger.unbond(who(a)),
    "take_bond": lambda town, a: town.ledger.withdraw_bond(who(a)),
    "bond": lambda town, a: town.ledger.post_bond(who(a), a.amount),
    "pause": pausing,
    "unpause": pausing,
}


def forced(town: Town, action: Action) -> SignedReceipt:
    """The receipt that somebody tries to force in: mostly the node's next."""
    node = town.node(action)
    counted = town.ledger.account(JOB, node.address).counted
    wanted = counted + (action.amount % 7 == 0)
    issued = town.issued(node)
    return issued[wanted] if wanted < len(issued) else town.signed(node, wanted, action)


def voucher(town: Town, action: Action) -> Voucher:
    """A voucher over some amount; the model pays what it promises."""
    node = NodeId(town.node(action).node_id)
    return Voucher(job=JOB, node=node, sequence=0, amount=Wei(action.amount))


def equivocal(town: Town, action: Action) -> tuple[SignedReceipt, SignedReceipt]:
    """Two receipts of one number, the same where the amounts happen to be."""
    node = town.node(action)
    other = action._replace(amount=action.amount // 2)
    return town.signed(node, 0, action), town.signed(node, 0, other)
