from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.settlement.epoch import (
    Epoch,
    EpochEnded,
    EpochEvent,
    EpochState,
    Move,
    Part,
    PartMoved,
    PartSealed,
    PaymentsCounted,
    refusal,
    transition,
)
from hypergpu.ids import JobId

EVENTS: st.SearchStrategy[EpochEvent] = st.one_of(
    st.builds(PartSealed, st.sampled_from(Part), st.integers(0, 9)),
    st.just(EpochEnded()),
    st.builds(PartMoved, st.sampled_from(Part), st.sampled_from(Move)),
    st.builds(PaymentsCounted, st.integers(0, 3), st.integers(0, 9), st.booleans(), st.booleans()),
)
ORDER = list(EpochState)


def walked(events: list[EpochEvent]) -> list[Epoch]:
    epochs = [Epoch(job_id=JobId("job-00000000000a"), number=0)]
    for event in events:
        epochs.append(transition(epochs[-1], event))
    return epochs


@given(st.lists(EVENTS, max_size=60))
def test_counts_never_pass_each_other(events: list[EpochEvent]) -> None:
    for epoch in walked(events):
        for part in Part:
            tally = epoch.tally(part)
            assert 0 <= tally.final <= tally.mined <= tally.sent <= tally.sealed
        assert epoch.close.sealed <= 1
        assert epoch.counted <= epoch.payment.mined
        assert epoch.checked <= epoch.payment.final


@given(st.lists(EVENTS, max_size=60))
def test_a_refused_event_changes_nothing_and_an_accepted_one_may(events: list[EpochEvent]) -> None:
    epoch = Epoch(job_id=JobId("job-00000000000a"), number=0)
    for event in events:
        said = refusal(epoch, event)
        after = transition(epoch, event)
        assert not said or after == epoch
        epoch = after


@given(st.lists(EVENTS, max_size=60))
def test_only_a_reorganisation_or_a_new_transaction_takes_an_epoch_back(
    events: list[EpochEvent],
) -> None:
    epochs = walked(events)
    for before, after, event in zip(epochs, epochs[1:], events, strict=False):
        if ORDER.index(after.state) < ORDER.index(before.state):
            assert isinstance(event, PartSealed | PaymentsCounted) or (
                isinstance(event, PartMoved) and event.move in {Move.MISSING, Move.UNDONE}
            )


@given(st.lists(EVENTS, max_size=60))
def test_what_happens_and_is_undone_leaves_the_epoch_as_it_was(events: list[EpochEvent]) -> None:
    epoch = walked(events)[-1]
    for part in Part:
        mined = PartMoved(part, Move.MINED)
        if not refusal(epoch, mined):
            there = transition(epoch, mined)
            assert transition(there, PartMoved(part, Move.MISSING)).tally(part) == epoch.tally(part)
