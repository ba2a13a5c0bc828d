"""Histories of the town that get somewhere: work is recorded, closed and paid, and people meddle.

Actions drawn one by one hardly ever come in the order in which anybody earns something, so that a
wrong pay rule would hardly ever show.
"""

from typing import NamedTuple

from hypothesis import strategies as st

from hypergpu.ledger import pay
from hypergpu.ledger.settlement.state import ShareState
from tests.properties.ledger.town import (
    JOB,
    NODES,
    TERMS,
    WINDOW_S,
    Action,
    Town,
    actions,
    ascending_nodes,
    nodes,
)

_EPOCHS = 3
_meddling: st.SearchStrategy[list[Action]] = st.lists(actions, max_size=2)
_payees = st.one_of(st.permutations(range(len(NODES))).map(tuple), ascending_nodes)
_works = st.lists(st.tuples(nodes, st.integers(1_000, 12_000)), min_size=3, max_size=6)
_forms = st.sampled_from(["aggregate", "packed"])
_closers = st.integers(0, 1)
"""The coordinator and the owner."""
_waits = st.sampled_from([0, 1, WINDOW_S, WINDOW_S + 1])


@st.composite
def lives(draw: st.DrawFn) -> list[Action]:
    """Epochs from their first update to their last payment, with others' actions in between."""
    history: list[Action] = []
    for epoch in range(draw(st.integers(1, _EPOCHS))):
        works = draw(_works)
        history += [Action("work", who=who, epoch=epoch, amount=amount) for who, amount in works]
        history += draw(_meddling)
        history += [Action(draw(_forms), epoch=epoch, amount=draw(st.integers(1, 9)))]
        history += draw(_meddling)
        history += [Action("close", who=draw(_closers), epoch=epoch)]
        history += [Action("pay", epoch=epoch, several=draw(_payees))]
        history += draw(_meddling)
        history += [Action("wait", amount=draw(_waits))]
        history += [Action("pay", epoch=epoch, several=draw(_payees))]
    return history


histories = st.one_of(lives(), lives(), lives(), st.lists(actions, max_size=40))
"""Most of them lives, the others anything at all."""


class Reached(NamedTuple):
    """How far a town has got, counted in epochs or in shares."""

    recorded: int
    closed: int
    """With a pool."""
    uneven: int
    """Of the closed: shares that have to be rounded."""
    priced: int
    """Of the closed: the escrow covers them, and a price off by 0.1 % is another pool."""
    paid: int
    """Shares, with more than nothing."""


def reached(town: Town) -> Reached:
    """What a history came to."""
    state = town.ledger.state
    closed = [(key[1], one) for key, one in state.epochs.items() if one.closed_at_s and one.pool]
    shares = {key[1:]: one for key, one in state.shares.items() if key[0] == JOB}
    uneven = {
        number
        for number, epoch in closed
        for (of, _), share in shares.items()
        if of == number and epoch.pool * share.score % epoch.total_score
    }
    priced = [
        number
        for number, epoch in closed
        if epoch.pool == TERMS.unit_price * epoch.total_score // pay.PRICED_SCORE
        and epoch.pool != TERMS.unit_price * epoch.total_score // (pay.PRICED_SCORE * 1001 // 1000)
    ]
    return Reached(
        recorded=len({number for (number, _), one in shares.items() if one.receipts}),
        closed=len(closed),
        uneven=len(uneven),
        priced=len(priced),
        paid=sum(one.state is ShareState.PAID and one.paid > 0 for one in shares.values()),
    )
