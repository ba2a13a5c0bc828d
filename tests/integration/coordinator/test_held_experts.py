"""A mixture of experts of which each node holds some, trained by real processes."""

import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from hypergpu.jobfile.spec import (
    CodecChoice,
    Evaluation,
    JobSpec,
    RoundRule,
    TrainingSettings,
    Trust,
)
from hypergpu.tensors.codec import update_bytes
from hypergpu.tensors.partial import part_layout
from hypergpu.workloads.networks.task import workload_layout
from hypergpu.workloads.registry import build, find
from tests.processes import Cluster, Happening, json_lines

EXPERTS, ROUNDS = 4, 3
OPTIONS: dict[str, str | int | float | bool] = {
    "experts": EXPERTS,
    "held_experts": 2,
    "experts_per_token": 1,
    "width": 32,
    "hidden": 128,
    "layers": 1,
    "block_length": 16,
    "corpus_bytes": 1 << 17,
}
ASSIGNED = re.compile(r"experts ([\d, ]+) of 4")


def mixture_spec(*, nodes: int = 2, rule: str = "robust") -> JobSpec:
    """A small mixture of experts of which each node holds half."""
    return JobSpec(
        workload="text-mixture",
        strategy="diloco",
        options=OPTIONS,
        training=TrainingSettings(rounds=ROUNDS, inner_steps=4, batch_size=8, nodes=nodes),
        codec=CodecChoice("int8", "int8"),
        round=RoundRule(quorum=1.0),
        evaluation=Evaluation(every=1),
        trust=Trust(rule=rule, duplicates="none"),
    )


def of_kind(events: list[Happening], kind: str) -> list[Happening]:
    return [event for event in events if event.kind == kind]


def held_experts(cluster: Cluster) -> dict[str, set[tuple[int, ...]]]:
    """The experts that each node was told to hold, by the logs of the nodes."""
    windows: dict[str, set[tuple[int, ...]]] = {}
    for node in cluster.nodes:
        for line in json_lines(node.log):
            if line["event"] == "ShardAssigned":
                match = ASSIGNED.search(line["reason"])
                assert match is not None, line["reason"]
                experts = tuple(map(int, match[1].split(", ")))
                windows.setdefault(str(node.log), set()).add(experts)
    return windows


def test_nodes_that_hold_half_of_the_experts_each_train_a_mixture(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes(2, "torch")
        job_id = cluster.submit(mixture_spec())
        events = list(cluster.events(job_id))
        view = cluster.job(job_id).job
        windows_by_node = held_experts(cluster)
        logs = [line for node in cluster.nodes for line in json_lines(node.log)]
    assert view.phase == "finished", view.reason
    losses = [each.fields["loss"] for each in of_kind(events, "EvaluationReady")]
    assert losses[-1] < losses[0]
    # Each node keeps its experts, and together they hold all.
    windows = [window for (window,) in windows_by_node.values()]
    assert Counter(expert for window in windows for expert in window) == Counter(range(EXPERTS))
    # Nobody sent more than its part, and what a node lacks of it came by changes.
    workload = build(find("text-mixture"), OPTIONS)
    layout = workload_layout(workload, workload.model())
    part_bytes = update_bytes(part_layout(layout, windows[0]), "int8")
    sizes = {
        each.fields["update"]["blob"]["size_bytes"] for each in of_kind(events, "UpdateReceived")
    }
    assert sizes == {part_bytes}
    assert part_bytes < 0.75 * update_bytes(layout, "int8")
    assert not [line for line in logs if "of no use" in line["event"]]


def last_model(events: list[Happening]) -> str:
    digest: str = of_kind(events, "AggregateReady")[-1].fields["model"]["blob"]["digest"]
    return digest


@pytest.mark.full
def test_a_coordinator_that_is_killed_makes_the_same_model_and_parts_again(
    tmp_path: Path,
) -> None:
    ends = []
    for name, failpoints in (
        ("quiet", ()),
        ("killed", ("initialise.stored", "aggregate.folded:2")),
    ):
        (tmp_path / name).mkdir()
        with Cluster(tmp_path / name) as cluster:
            cluster.add_nodes(2, "torch")
            if failpoints:
                cluster.coordinator.end()
                cluster.coordinator.start(failpoints=failpoints[0])
            job_id = cluster.submit(mixture_spec(rule="mean"))
            for next_failpoint in (*failpoints[1:], "") if failpoints else ():
                assert cluster.coordinator.child.wait(timeout=240) == -signal.SIGKILL
                cluster.coordinator.end()
                cluster.coordinator.launch(failpoints=next_failpoint)
            if failpoints:
                cluster.coordinator.wait_until_serving()
            events = list(cluster.events(job_id))
            assert cluster.job(job_id).job.phase == "finished"
            ends.append((last_model(events), of_kind(events, "AggregateReady")[-1].fields["model"]))
    assert ends[0] == ends[1]
