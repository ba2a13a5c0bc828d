"""Pure decisions of the coordinator: phases against events, nodes dealt to jobs, deltas."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import replace

from coordinator.core.training.job.blobs import live_blobs
from coordinator.core.training.job.chain import DELTAS_MOST, extend_chain, initial_of
from coordinator.core.training.job.events import Event
from coordinator.core.training.job.state import (
    Job,
    Model,
    Phase,
)
from coordinator.core.training.transition import rejection, transition
from coordinator.core.work.allocation import (
    RECALL_LIMIT_MS,
    Lend,
    Recall,
    Withdraw,
    plan_allocation,
)
from coordinator.core.work.demand import JobDemand, NodeOffer, unfit_reason
from hypergpu.assignment import Delta
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.jobfile.requirements import parse_requirement
from hypergpu.optimizer import OPTIMIZERS
from hypergpu.units import Bytes
from hypergpu.wire.messages import blob_value, model_message
from tests.unit.job_states import all_events, states, training

TABLE = Path(__file__).with_name("pair_table.txt")


def outcome(job: Job, event: Event) -> str:
    """One cell: the refusal, or the phase after the event and the commands it leads to."""
    if reason := rejection(job, event):
        return f"refused: {reason}"
    step = transition(job, event)
    names = [type(command).__name__ for command in step.commands]
    return f"-> {step.job.phase.value} [{', '.join(names)}]"


def pair_table() -> str:
    """Every phase against every event, one line a pair."""
    lines = [
        f"{phase.value:11} {type(event).__name__:17} {outcome(job, event)}"
        for phase, job in states().items()
        for event in all_events()
    ]
    return "\n".join(lines) + "\n"


def test_the_table_covers_every_phase_and_every_event() -> None:
    assert set(states()) == set(Phase)
    assert {type(event) for event in all_events()} == set(get_args(Event))


def test_every_pair_has_its_committed_outcome() -> None:
    assert pair_table() == TABLE.read_text()


def test_a_refused_event_changes_nothing() -> None:
    for job in states().values():
        for event in all_events():
            if rejection(job, event):
                assert transition(job, event) == (job, ())


if __name__ == "__main__":
    sys.exit(TABLE.write_text(pair_table()) == 0)


WORKLOADS = {"digits-softmax": 1}


def demand(name: str, *members: str, nodes_min: int = 1, version: int = 1) -> JobDemand:
    nodes = frozenset(NodeId(member) for member in members)
    return JobDemand(JobId(name), nodes_min, "digits-softmax", version, nodes)


def offers(free: str, **held: str) -> list[NodeOffer]:
    """Free nodes as letters, held ones as job="letters"."""
    free_nodes = [NodeOffer(NodeId(letter), None, WORKLOADS) for letter in free]
    held_nodes = [
        NodeOffer(NodeId(letter), JobId(job), WORKLOADS)
        for job, letters in held.items()
        for letter in letters
    ]
    return free_nodes + held_nodes


def test_free_nodes_are_dealt_out_evenly() -> None:
    moves = plan_allocation([demand("one"), demand("two")], offers("abcd"))
    assert sorted(move.job_id for move in moves) == ["one", "one", "two", "two"]
    assert all(isinstance(move, Lend) for move in moves)


def test_a_job_that_cannot_start_gets_no_nodes() -> None:
    moves = plan_allocation([demand("big", nodes_min=3), demand("small")], offers("ab"))
    assert {move.job_id for move in moves} == {"small"}


def test_a_second_job_gets_its_share_back_from_the_first() -> None:
    moves = plan_allocation(
        [demand("one", "a", "b", "c", "d"), demand("two")], offers("", one="abcd")
    )
    assert [type(move) for move in moves] == [Recall, Recall]
    assert {move.job_id for move in moves} == {"one"}


def test_a_balanced_allocation_moves_nothing() -> None:
    demands = [demand("one", "a", "b"), demand("two", "c")]
    assert plan_allocation(demands, offers("", one="ab", two="c")) == ()


def test_a_node_without_the_labels_that_a_job_asks_for_is_not_lent() -> None:
    (offer,) = offers("a")
    stated_demand = replace(demand("one"), trust_labels=frozenset({"home", "ours"}))
    assert "the label 'home'" in unfit_reason(stated_demand, offer)
    some_labels = replace(offer, trust_labels=frozenset({"home"}))
    assert "the label 'ours'" in unfit_reason(stated_demand, some_labels)
    assert not unfit_reason(stated_demand, replace(offer, trust_labels=stated_demand.trust_labels))


def test_a_node_with_a_later_version_that_trains_alike_is_lent() -> None:
    (offer,) = offers("a")
    later = replace(offer, workloads={"digits-softmax": 2})
    stated_demand = demand("one")
    assert "it does not offer" in unfit_reason(stated_demand, later)
    alike = replace(stated_demand, later_versions=frozenset({2}))
    assert not unfit_reason(alike, later)


def test_a_node_without_the_workloads_version_is_not_lent() -> None:
    assert plan_allocation([demand("one", version=2)], offers("ab")) == ()


def test_nodes_of_a_paused_job_count_as_free() -> None:
    (move,) = plan_allocation([demand("two")], offers("", paused="a"))
    assert (move.node, move.job_id) == ("a", "two")


def test_a_paused_node_is_withdrawn_with_its_reason_and_lent_to_nobody() -> None:
    held_offer = NodeOffer(NodeId("a"), JobId("one"), WORKLOADS, "paused by its owner")
    demands = [demand("one", "a"), demand("two")]
    moves = plan_allocation(demands, [held_offer, *offers("b")])
    assert moves == (Withdraw(NodeId("a"), JobId("one"), "paused by its owner"),)
    free = NodeOffer(NodeId("a"), None, WORKLOADS, "paused by its owner")
    assert plan_allocation([demand("one")], [free]) == ()


def test_a_newcomer_is_lent_while_members_are_away_for_a_moment() -> None:
    (move,) = plan_allocation([demand("one", "a", "b")], offers("c"))
    assert (move.node, move.job_id) == ("c", "one")


def test_a_started_job_is_not_starved_by_one_that_needs_more_to_start() -> None:
    demands = [demand("early", nodes_min=3), demand("late", "a", "b")]
    moves = plan_allocation(demands, offers("c", late="ab"))
    assert {move.job_id for move in moves} == {"late"}


def test_a_node_that_does_not_finish_after_it_was_asked_back_is_taken() -> None:
    late = NodeOffer(NodeId("a"), JobId("long"), WORKLOADS, leaving_ms=RECALL_LIMIT_MS)
    demands = [demand("long"), demand("next")]
    assert plan_allocation(demands, [late]) == ()
    (move,) = plan_allocation(demands, [replace(late, leaving_ms=RECALL_LIMIT_MS + 1)])
    assert isinstance(move, Withdraw)
    assert (move.node, move.job_id) == ("a", "long")
    assert move.reason == "it did not finish within 10 min of being asked back"


def wanting(name: str, *members: str, requires: str, nodes_max: int = 0) -> JobDemand:
    requirements = (parse_requirement(requires),) if requires else ()
    return replace(demand(name, *members), requirements=requirements, nodes_max=nodes_max)


def machines(**held: str) -> list[NodeOffer]:
    """Nodes as job="letters", free ones as free="letters"; those in capitals have a GPU."""
    return [
        NodeOffer(
            NodeId(letter),
            None if job == "free" else JobId(job),
            WORKLOADS,
            features={"gpu": 8 * 10**9 if letter.isupper() else 0},
        )
        for job, letters in held.items()
        for letter in letters
    ]


def loans(demands: Sequence[JobDemand], offered: Sequence[NodeOffer]) -> dict[str, str]:
    moves = plan_allocation(demands, offered)
    return {move.node: move.job_id for move in moves if isinstance(move, Lend)}


def test_a_node_that_does_not_fit_is_not_lent() -> None:
    assert loans([wanting("one", requires="gpu >= 8GB")], machines(free="Ab")) == {"A": "one"}


def test_a_node_whose_torch_lacks_an_operator_is_not_lent_and_is_asked_back() -> None:
    calling_demand = replace(
        demand("one", "a"), operators=frozenset({"aten.new.default", "aten.add"})
    )
    missing_operators = frozenset({"aten.new.default", "aten.other.default"})
    able, unable = (
        NodeOffer(NodeId(name), holder, WORKLOADS, torch="2.6.0", lacking_operators=lacks)
        for name, holder, lacks in (
            ("b", None, frozenset()),
            ("a", JobId("one"), missing_operators),
        )
    )
    reason = (
        "its torch 2.6.0 lacks aten.new.default, which the model calls."
        " Fix there: pip install -U torch"
    )
    loan, recall = plan_allocation([calling_demand], [able, unable])
    assert isinstance(loan, Lend)
    assert loan.node == "b"
    assert recall == Recall(NodeId("a"), JobId("one"), reason)


def test_a_node_of_a_version_without_the_optimizer_is_not_lent_and_is_asked_back() -> None:
    wanting_muon = replace(demand("one", "a"), optimizer="muon")
    newer = NodeOffer(NodeId("b"), None, WORKLOADS, optimizers=frozenset(OPTIMIZERS))
    older = NodeOffer(NodeId("a"), JobId("one"), WORKLOADS)
    loan, recall = plan_allocation([wanting_muon], [newer, older])
    assert isinstance(loan, Lend)
    assert loan.node == "b"
    assert isinstance(recall, Recall)
    assert recall.reason == (
        "its version has no optimizer muon. Fix there: pip install --upgrade hypergpu;"
        " or state another inner.optimizer in the job"
    )


def test_a_job_gets_no_more_nodes_than_it_takes() -> None:
    demands = [wanting("one", requires="", nodes_max=1), demand("two")]
    assert sorted(loans(demands, machines(free="abcd")).values()) == ["one", "two", "two", "two"]


@pytest.mark.parametrize("first", ["any", "picky"])
def test_a_node_that_only_one_job_can_use_goes_to_others_last(first: str) -> None:
    demands = [demand("any"), wanting("picky", requires="gpu >= 8GB")]
    demands.sort(key=lambda each: each.job_id != first)
    assert loans(demands, machines(free="Abc")) == {"A": "picky", "b": "any", "c": "any"}


def test_a_job_swaps_its_node_for_a_free_one_that_the_other_job_cannot_use() -> None:
    demands = [demand("any", "A"), wanting("picky", requires="gpu >= 8GB")]
    moves = plan_allocation(demands, machines(any="A", free="b"))
    due = "free, and any is due 1 node"
    assert moves == (
        Lend(NodeId("b"), JobId("any"), due),
        Recall(NodeId("A"), JobId("any"), "picky is due a share of the nodes"),
    )
    after = [demand("any", "b"), wanting("picky", "A", requires="gpu >= 8GB")]
    assert plan_allocation(after, machines(any="b", picky="A")) == ()


def test_a_member_that_fits_no_more_is_recalled_with_the_reason() -> None:
    (move,) = plan_allocation([wanting("one", "a", requires="gpu >= 8GB")], machines(one="a"))
    assert move == Recall(NodeId("a"), JobId("one"), "its gpu is none, and gpu >= 8GB is required")


def test_a_job_whose_nodes_are_not_there_leaves_the_others_theirs() -> None:
    demands = [replace(wanting("big", requires="gpu > 1GB"), nodes_min=2), demand("small")]
    assert loans(demands, machines(free="Abc")) == {"A": "small", "b": "small", "c": "small"}


def test_a_job_that_swaps_its_node_gives_the_first_one_back() -> None:
    demands = [
        wanting("any", "A", requires="", nodes_max=1),
        wanting("picky", "B", requires="gpu >= 8GB", nodes_max=1),
    ]
    moves = plan_allocation(demands, machines(any="A", picky="B", free="c"))
    assert [(type(move), move.node, move.job_id) for move in moves] == [
        (Lend, "c", "any"),
        (Recall, "A", "any"),
    ]
    after = [replace(demands[0], members=frozenset({NodeId("c")})), demands[1]]
    assert plan_allocation(after, machines(any="c", picky="B", free="A")) == ()


def test_a_job_that_cannot_start_makes_no_other_swap_nodes() -> None:
    big = replace(wanting("big", requires="gpu >= 8GB"), nodes_min=2)
    demands = [wanting("any", "A", requires="", nodes_max=1), big]
    assert plan_allocation(demands, machines(any="A", free="b")) == ()


def test_a_member_without_the_workloads_version_or_the_data_set_is_recalled() -> None:
    reasons = [
        move.reason
        for changed_demand in (
            demand("one", "a", version=2),
            replace(demand("one", "a"), data_name="my"),
        )
        for move in plan_allocation([changed_demand], offers("", one="a"))
    ]
    version_reason = (
        "it does not offer digits-softmax 2, but 1. Fix there: pip install --upgrade hypergpu"
    )
    assert reasons == [version_reason, "its owner has named no folder for my"]


def test_a_job_gets_another_node_for_one_that_it_gives_no_work() -> None:
    held_demand = wanting("one", "a", requires="", nodes_max=1)
    excluding_demand = replace(held_demand, excluded={NodeId("a"): "left out"})
    assert loans([excluding_demand], offers("b", one="a")) == {"b": "one"}
    assert plan_allocation([excluding_demand], offers("", one="a")) == ()
    assert loans([excluding_demand], offers("b")) == {"b": "one"}


def test_nodes_that_a_job_gives_no_work_go_to_one_that_can_use_them() -> None:
    left_out = {NodeId(letter): "left out" for letter in "ab"}
    demands = [replace(demand("one", "a", "b"), excluded=left_out), demand("two", nodes_min=2)]
    moves = plan_allocation(demands, offers("", one="ab"))
    assert [(type(move), move.node, move.job_id) for move in moves] == [
        (Recall, "a", "one"),
        (Recall, "b", "one"),
    ]


MODEL_BYTES = Bytes(1000)


def test_of_equal_nodes_the_healthiest_is_asked_first() -> None:
    one = demand("one")
    one = replace(one, nodes_max=1)
    offer_list = [
        replace(offer, health=0.9 if offer.node == "c" else 0.4) for offer in offers("abc")
    ]
    assert loans([one], offer_list) == {"c": "one"}


def test_a_job_keeps_its_own_node_though_another_is_healthier() -> None:
    own = replace(demand("one", "a"), nodes_max=1)
    offer_list = [
        replace(offer, health=0.1 + (offer.node == "b")) for offer in offers("b", one="a")
    ]
    assert plan_allocation([own], offer_list) == ()


def test_an_excluded_node_goes_only_to_a_job_that_lacks_its_least_nodes() -> None:
    offer_list = [
        replace(offer, health_exclusion="its quality fell" if offer.node == "a" else "")
        for offer in offers("ab")
    ]
    assert loans([demand("one")], offer_list) == {"b": "one"}
    assert loans([demand("one", nodes_min=2)], offer_list) == {"a": "one", "b": "one"}


def test_a_member_that_is_excluded_is_asked_back_with_the_reason() -> None:
    offer_list = [
        replace(offer, health_exclusion="its quality fell" if offer.node == "a" else "")
        for offer in offers("", one="ab")
    ]
    recalls = plan_allocation([demand("one", "a", "b")], offer_list)
    assert [(each.node, each.reason) for each in recalls] == [("a", "its quality fell")]


def digest_named(kind: str, number: int) -> Digest:
    return Digest(f"{kind}{number:0{64 - len(kind)}}")


def after_rounds(rounds: int, delta_bytes: int) -> Model:
    """A model after so many rounds, each of which left a delta of that size."""
    model = Model(0, BlobRef(digest_named("a", 0), MODEL_BYTES))
    for number in range(1, rounds + 1):
        blob = BlobRef(digest_named("b", number), Bytes(delta_bytes))
        deltas = extend_chain(model, Delta(model.blob.digest, blob, "int4"), MODEL_BYTES)
        model = Model(number, BlobRef(digest_named("a", number), MODEL_BYTES), deltas=deltas)
    return model


def test_each_delta_leads_to_the_base_of_the_next() -> None:
    bases = [delta.base for delta in after_rounds(3, 10).deltas]
    assert bases == [digest_named("a", 0), digest_named("a", 1), digest_named("a", 2)]


def test_all_deltas_together_are_less_than_half_a_model() -> None:
    assert len(after_rounds(20, 100).deltas) == 4
    assert len(after_rounds(20, 99).deltas) == 5


def test_the_newest_delta_is_kept_however_large() -> None:
    deltas = after_rounds(5, 700).deltas
    assert [delta.base for delta in deltas] == [digest_named("a", 4)]


def test_no_more_deltas_are_kept_than_are_worth_applying() -> None:
    deltas = after_rounds(40, 1).deltas
    assert len(deltas) == DELTAS_MOST
    assert deltas[-1].base == digest_named("a", 39)


def test_no_delta_that_a_node_may_be_told_of_is_collected() -> None:
    job = training()
    model = after_rounds(3, 10)
    live = live_blobs(type(job)(job_id=job.job_id, spec=job.spec, model=model))
    assert {delta.blob.digest for delta in model.deltas} <= live


def test_nodes_are_told_of_all_deltas_in_order() -> None:
    model = after_rounds(3, 10)
    message = model_message(model.blob, model.deltas, digest_named("c", 0))
    digests = [blob_value(delta.blob).digest for delta in message.deltas]
    assert digests == [digest_named("b", 1), digest_named("b", 2), digest_named("b", 3)]


def test_nodes_can_draw_the_first_model_as_long_as_deltas_lead_on_from_it() -> None:
    drawable = [initial_of(after_rounds(rounds, 100)) for rounds in range(7)]
    assert drawable == [digest_named("a", 0)] * 5 + [None] * 2


def test_a_model_without_deltas_is_only_drawn_before_the_first_round() -> None:
    whole = Model(2, BlobRef(digest_named("a", 2), MODEL_BYTES))
    assert initial_of(whole) is None


def test_a_chain_that_a_round_without_an_update_or_a_delta_broke_leads_on_from_nothing() -> None:
    base = after_rounds(2, 10)
    unchanged_model = Model(3, base.blob, deltas=base.deltas)
    assert initial_of(unchanged_model) is None
    begun_anew = Model(
        2, BlobRef(digest_named("a", 2), MODEL_BYTES), deltas=after_rounds(1, 10).deltas
    )
    assert initial_of(begun_anew) is None
