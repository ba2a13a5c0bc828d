"""A mixture of experts of which each node holds some, trained by real processes."""

from pathlib import Path

from hypergpu.jobfile.spec import CodecChoice, Evaluation, JobSpec, TrainingSettings
from tests.processes import Cluster, Happening

NODES, EXPERTS, HELD = 4, 8, 3


def mixture_spec(rounds: int = 3, *, down: str = "int8", held: int = HELD) -> JobSpec:
    """A small mixture of 8 experts."""
    return JobSpec(
        workload="text-mixture",
        strategy="diloco",
        options={
            "experts": EXPERTS,
            "held_experts": held,
            "width": 32,
            "hidden": 128,
            "layers": 1,
            "block_length": 16,
            "corpus_bytes": 1 << 17,
        },
        training=TrainingSettings(rounds=rounds, inner_steps=4, batch_size=8, nodes=NODES),
        codec=CodecChoice("int8", down),
        evaluation=Evaluation(every=1),
    )


def models(events: list[Happening]) -> list[dict[str, object]]:
    """Bodies of the models of a job, from the first."""
    return [
        each.fields["model"]
        for each in events
        if each.kind in {"ModelInitialised", "AggregateReady"}
    ]


def test_four_nodes_with_three_of_eight_experts_each_train_a_mixture(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes(NODES, "torch")
        job_id = cluster.submit(mixture_spec())
        events = list(cluster.events(job_id))
        view = cluster.job(job_id).job
    losses = [each.fields["loss"] for each in events if each.kind == "EvaluationReady"]
    assert view.phase == "finished", view.reason
    assert losses[-1] < losses[0]
