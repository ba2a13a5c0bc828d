"""What partial replicas of a mixture of experts save and cost, and what a liar among them does."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from benchmarks.ours.table import PartFigures
from benchmarks.ours.workloads.experts.mixture_job import Lie, MixtureJob, MixtureNode
from hypergpu.experts import Mixture
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import (
    CodecChoice,
    Evaluation,
    Inner,
    JobSpec,
    RoundRule,
    TrainingSettings,
    Trust,
)
from hypergpu.tensors.layout import Flat, Layout, TensorKind, unpack
from hypergpu.tensors.partial import expert_of

NODES, MIXTURE = 4, Mixture(experts=8, held=3, per_token=1)
ROUNDS, INNER_STEPS, BATCH = 40, 10, 8
LIAR = NODES - 1
_PEAK_STEPS = 3


def turn_update(_layout: Layout, update: Flat) -> None:
    """Turn the whole update round."""
    update.parameters[...] *= -1


def lengthen_turned_update(_layout: Layout, update: Flat) -> None:
    """Turn the whole update round, ten times as long."""
    update.parameters[...] *= -10


def turn_experts(layout: Layout, update: Flat) -> None:
    """Turn its experts round, and leave what all share honest."""
    tensors = cast("dict[str, NDArray[Any]]", unpack(layout, update))
    for tensor in layout.tensors:
        if tensor.kind is TensorKind.PARAMETER and expert_of(tensor) is not None:
            tensors[tensor.name] *= -1


def claim_an_expert(layout: Layout, update: Flat) -> None:
    """Turn one of its experts round, and say that it got every token."""
    tensors = cast("dict[str, NDArray[Any]]", unpack(layout, update))
    first = min(expert for each in layout.tensors if (expert := expert_of(each)) is not None)
    for tensor in layout.tensors:
        expert = expert_of(tensor)
        if tensor.kind is TensorKind.INTEGER:
            tensors[tensor.name][...] = 1 << 40 if expert == first else 0
        elif expert == first:
            tensors[tensor.name] *= -1


LIES: Mapping[str, Lie] = {
    "turned round": turn_update,
    "turned round, ten times as long": lengthen_turned_update,
    "its experts turned round": turn_experts,
    "one expert turned round, all tokens claimed for it": claim_an_expert,
}


class MixtureOutcome(NamedTuple):
    """How a job ended."""

    loss: float
    nodes: dict[NodeId, MixtureNode]

    @property
    def node_bytes(self) -> float:
        """Bytes both ways of a node, in the mean."""
        return fmean(each.up_bytes + each.down_bytes for each in self.nodes.values())

    @property
    def liar_pay(self) -> float:
        """The liar's share of all pay."""
        total = sum(each.pay for each in self.nodes.values())
        return self.nodes[NodeId(f"n{LIAR}")].pay / total if total else 0.0


def spec_of(
    held: int,
    *,
    seed: int = 0,
    rule: str = "mean",
    rounds: int = ROUNDS,
    per_token: int = MIXTURE.per_token,
) -> JobSpec:
    """A job of a small mixture."""
    return JobSpec(
        workload="text-mixture",
        strategy="diloco",
        options={
            "experts": MIXTURE.experts,
            "held_experts": held,
            "experts_per_token": per_token,
            "width": 64,
            "hidden": 256,
            "layers": 2,
            "block_length": 32,
            "corpus_bytes": 1 << 20,
        },
        training=TrainingSettings(rounds, INNER_STEPS, BATCH, seed, NODES),
        inner=Inner(learning_rate=2e-3),
        codec=CodecChoice("int4", "int4"),
        round=RoundRule(quorum=1.0),
        evaluation=Evaluation(every=rounds),
        trust=Trust(rule=rule),
    )


def outcome_of(
    spec: JobSpec, lies: Mapping[int, Lie] | None = None, absent: frozenset[int] = frozenset()
) -> MixtureOutcome:
    """Play a job."""
    with tempfile.TemporaryDirectory(prefix="hypergpu-bench-") as folder:
        job = MixtureJob(spec, Path(folder), lies or {}, absent)
        return MixtureOutcome(job.loss(), dict(job.nodes))


def expert_figures(*, is_quick: bool) -> PartFigures:
    """Train by whole and by partial replicas, and with a liar in four."""
    torch.set_num_threads(1)
    rounds, seeds = (3, (0,)) if is_quick else (ROUNDS, (0, 1))
    one = [
        ReplicaComparison(
            f"held-out loss, a token goes to one expert, seed {seed}",
            *(outcome_of(spec_of(count, seed=seed, rounds=rounds)) for count in (0, MIXTURE.held)),
        )
        for seed in seeds
    ]
    two = ReplicaComparison(
        "held-out loss, a token goes to two",
        *(outcome_of(spec_of(count, rounds=rounds, per_token=2)) for count in (0, MIXTURE.held)),
    )
    memory_share, memory_row = _memory(4 if is_quick else 24)
    liar_metrics, liar_rows, honest_loss = _liars(rounds, 1 if is_quick else len(LIES))
    first = one[0]
    bytes_share = first.part.node_bytes / first.whole.node_bytes
    bytes_row = [
        "bytes of a node both ways",
        f"{first.whole.node_bytes / 1e6:.2f} MB",
        f"{first.part.node_bytes / 1e6:.2f} MB",
        f"{bytes_share:.3f}",
        "with the first model, which holders of a part fetch",
    ]
    part_loss, whole_loss = (
        fmean(each.loss for each in outcomes)
        for outcomes in ([each.part for each in one], [each.whole for each in one])
    )
    metrics = {
        "experts_loss_ratio": part_loss / whole_loss,
        "experts_loss_ratio_two": two.part.loss / two.whole.loss,
        "experts_bytes_share": bytes_share,
        "experts_memory_share": memory_share,
        **liar_metrics,
    }
    note = (
        f"Partial replicas: {NODES} nodes hold {MIXTURE.held} of {MIXTURE.experts} experts; beside"
        f" them whole replicas. {rounds} rounds of {INNER_STEPS} steps of {BATCH} x 32 bytes, int4"
        f" both ways, {len(seeds)} seeds. With a liar, one seed: beside the job in which the liar"
        f" is absent; where it is honest the loss is {honest_loss:.3f}."
    )
    rows = [*(each.row for each in (*one, two)), bytes_row, memory_row, *liar_rows]
    return PartFigures(rows=rows, metrics=metrics, notes=[note])


class ReplicaComparison(NamedTuple):
    """The same job by whole and by partial replicas."""

    name: str
    whole: MixtureOutcome
    part: MixtureOutcome

    @property
    def row(self) -> list[str]:
        """Its losses."""
        whole, part = self.whole.loss, self.part.loss
        return [self.name, f"{whole:.3f}", f"{part:.3f}", f"{part / whole:.3f}", ""]


def _liars(rounds: int, lies: int) -> tuple[dict[str, float], list[list[str]], float]:
    """Figures and rows of jobs with a liar, and the loss of the job in which it is honest."""
    spec = spec_of(MIXTURE.held, rule="robust", rounds=rounds)
    honest = outcome_of(spec)
    # A job opens with the nodes that it states: without the liar it states one less.
    absent = outcome_of(_with_nodes(spec, NODES - 1), absent=frozenset({LIAR}))
    liar_outcomes = {name: outcome_of(spec, {LIAR: lie}) for name, lie in list(LIES.items())[:lies]}
    metrics = {
        "experts_honest_over_absent": honest.loss / absent.loss,
        "experts_liar_loss_ratio": max(each.loss for each in liar_outcomes.values()) / absent.loss,
        "experts_liar_pay": max(each.liar_pay for each in liar_outcomes.values()),
    }
    rows = [
        [
            f"a liar in four: {name}",
            f"{absent.loss:.3f}",
            f"{each.loss:.3f}",
            f"{each.loss / absent.loss:.3f}",
            f"{100 * each.liar_pay:.1f} % of all pay",
        ]
        for name, each in liar_outcomes.items()
    ]
    return metrics, rows, honest.loss


def _with_nodes(spec: JobSpec, nodes: int) -> JobSpec:
    return replace(spec, training=replace(spec.training, nodes=nodes))


def _memory(millions: int) -> tuple[float, list[str]]:
    """Peak memory of training with part of a mixture over that with all of it, measured in a
    process each, and its row.
    """
    whole, part = (_peak_bytes(count, millions) for count in (0, MIXTURE.held))
    return part / whole, [
        "peak memory that a mixture takes in training",
        f"{whole / 1e6:.0f} MB",
        f"{part / 1e6:.0f} MB",
        f"{part / whole:.3f}",
        f"of {millions}M parameters, so that torch itself is little",
    ]


def _peak_bytes(held: int, millions: int) -> int:
    module = "benchmarks.ours.workloads.experts.peak"
    command = [sys.executable, "-m", module, str(held), str(millions), str(_PEAK_STEPS)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
