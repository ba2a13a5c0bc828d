"""Random journals of jobs that pay, as facts, and the receipts that follow."""

from collections.abc import Iterable

from hypothesis import strategies as st

from hypergpu.digest import digest_of
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec, Pay, TrainingSettings
from hypergpu.keys.signature import IdentityKey
from hypergpu.statements.receipt import Receipt
from hypergpu.units import BasisPoints
from payments.core.facts import (
    BlobName,
    CreatedFact,
    EndedFact,
    Fact,
    FirstModel,
    InitialisedFact,
    MeasuredFact,
    MeasuredWork,
)
from payments.core.ledger import LedgerState, UnsignedReceipt, fold
from tests.properties.statements.strategies import JOB, TERMS, Work, contribution_of, node_key

NODES = [node_key(number) for number in range(4)]
ROUNDS_PER_EPOCH = 3
PRICE = 1_700_003


def spec(*, price: int = PRICE, escrow: int = 10**15, rounds: int = 30) -> JobSpec:
    """Job file of a job that pays."""
    pay = Pay(unit_price=price, escrow=escrow, rounds_per_epoch=ROUNDS_PER_EPOCH)
    return JobSpec(workload="digits", training=TrainingSettings(rounds=rounds), pay=pay)


def job_created(**figures: int) -> CreatedFact:
    """The job's first fact."""
    return CreatedFact(job_id=JOB, spec=spec(**figures), terms=TERMS)


INITIALISED = InitialisedFact(FirstModel(BlobName(digest_of(b"a model"))))


def round_measured(round_: int, works: Iterable[tuple[IdentityKey, int, int]]) -> MeasuredFact:
    """A measured round of nodes with their samples and quality."""
    updates = tuple(
        MeasuredWork(
            contribution=contribution_of(
                node, Work(round_, round_ // ROUNDS_PER_EPOCH, samples, quality)
            ),
            signature=b"signed by %s" % node.node_id.encode(),
            quality_bps=BasisPoints(quality),
            evaluator="agreement",
        )
        for node, samples, quality in works
    )
    return MeasuredFact(round=round_, updates=updates)


works = st.lists(
    st.tuples(st.sampled_from(NODES), st.integers(1, 5_000), st.integers(0, 10_000)),
    max_size=4,
    unique_by=lambda work: work[0].node_id,
)


@st.composite
def journals(draw: st.DrawFn, *, is_ended: bool = True) -> list[Fact]:
    """Creation, measured rounds in ascending order (some missing), and the end."""
    rounds = sorted(draw(st.sets(st.integers(0, 14), max_size=10)))
    facts: list[Fact] = [job_created()]
    facts.extend(round_measured(number, draw(works)) for number in rounds)
    return [*facts, EndedFact("completed", "")] if is_ended else facts


def fold_all(
    facts: Iterable[Fact], state: LedgerState | None = None
) -> tuple[LedgerState, list[UnsignedReceipt]]:
    """Fold facts in order."""
    receipts: list[UnsignedReceipt] = []
    for fact in facts:
        folded = fold(state, fact)
        state = folded.state
        receipts.extend(folded.receipts)
    assert state is not None
    return state, receipts


def newest(receipts: Iterable[UnsignedReceipt]) -> dict[NodeId, Receipt]:
    """Newest receipt of each node."""
    return {each.receipt.node: each.receipt for each in receipts}
