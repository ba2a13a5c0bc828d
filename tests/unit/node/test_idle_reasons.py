"""An owner reads why a node has no work: the kind that waits, and the line that allows it."""

from coordinator.core.work.demand import JobDemand, NodeOffer
from coordinator.core.work.waiting_kinds import KINDS_MOST, WaitingKind, waiting_kinds
from gpu_node.core.idle_reasons import WaitingWork, idle_reasons, work_summary
from gpu_node.core.limits import OwnerLimits
from hypergpu.ids import JobId, NodeId
from hypergpu.jobfile.requirements import parse_requirement
from hypergpu.serving.serve_request import TUNED_KIND

OWN = OwnerLimits(kinds=("training", "embed"))
OFFER = NodeOffer(NodeId("node"), None, {"digits-cnn": 1, "map/embed": 1})


def demand(workload: str, version: int = 1, **fields: object) -> JobDemand:
    """A job that can use nodes."""
    values = {"members": frozenset(), **fields}
    return JobDemand(JobId("job"), 1, workload, version, **values)  # type: ignore[arg-type]


def test_a_kind_that_the_owner_does_not_allow_is_told_with_the_line_that_would() -> None:
    (sentence,) = idle_reasons([WaitingWork("map/score")], OWN)
    assert sentence == (
        "a job of kind score waits: its owner allows no work of kind score here; this line in"
        ' node.toml allows it: kinds = ["training", "embed", "score"]'
    )
    (sentence,) = idle_reasons([WaitingWork("training")], OwnerLimits(kinds=("embed",)))
    assert 'kinds = ["embed", "training"]' in sentence


def test_an_allowed_kind_that_the_node_cannot_do_is_told_with_the_reason() -> None:
    reasons = idle_reasons([WaitingWork("map/embed"), WaitingWork("training", "too small")], OWN)
    assert reasons == (
        (
            "a job of kind embed waits, which this node's worker cannot do:"
            " pip install 'hypergpu[farm]' there"
        ),
        "a job of kind training waits, and this node does not fit: too small",
    )


def test_an_idle_node_is_told_the_kinds_that_it_gets_none_of() -> None:
    requirement = (parse_requirement("gpu >= 8GB"),)
    demands = [
        demand("map/score"),
        demand("map/score"),
        demand("map/embed"),
        demand("map/embed", requirements=requirement),
        demand("digits-cnn", data_name="chest-xrays"),
        demand("map/generate", nodes_max=1, members=frozenset({NodeId("other")})),
    ]
    assert waiting_kinds(demands, OFFER) == (
        WaitingKind("map/score"),
        WaitingKind("map/embed", "it tells no property gpu, and gpu >= 8GB is required"),
        WaitingKind("training", "its owner has named no folder for the job's data"),
    )


def test_no_more_kinds_are_told_than_anybody_reads() -> None:
    demands = [demand(f"map/kind-{number}") for number in range(3 * KINDS_MOST)]
    assert len(waiting_kinds(demands, OFFER)) == KINDS_MOST
    works = [WaitingWork(f"map/kind-{number}") for number in range(3 * KINDS_MOST)]
    assert len(idle_reasons(works, OWN)) == KINDS_MOST


def test_whoever_joins_reads_what_the_machine_will_do() -> None:
    assert work_summary(OwnerLimits()) == (
        "this machine will do work of kind training alone; its owner adds kinds of farm jobs:"
        " --kinds training,embed"
    )
    pinned_limits = OwnerLimits(kinds=("training", "embed"), spec_keys=("ab" * 32,))
    assert "training and embed, of farm jobs what 1 pinned keys signed" in (
        work_summary(pinned_limits)
    )


def test_a_fine_tuning_that_waits_to_be_served_names_both_extras() -> None:
    limits = OwnerLimits(kinds=("training", "serve"))
    (sentence,) = idle_reasons([WaitingWork(TUNED_KIND)], limits)
    assert "pip install 'hypergpu[farm,hf]' there" in sentence
