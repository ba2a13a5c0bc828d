"""What partial replicas of a mixture of experts save and cost, and what a liar among them does."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from msgspec.structs import replace

from benchmarks.ours.table import PartFigures
from benchmarks.ours.workloads.experts.mixture_job import Lie, MixtureJob, NodeState
from hypergpu.experts import Mixture
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
    tensors = unpack(layout, update)
    for tensor in layout.tensors:
        if tensor.kind is TensorKind.PARAMETER and expert_of(tensor) is not None:
            tensors[tensor.name] *= -1


def claim_an_expert(layout: Layout, update: Flat) -> None:
    """Turn one of its experts round, and say that it got every token."""
    tensors = unpack(layout, update)
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


class Outcome(NamedTuple):
    """How a job ended."""

    loss: float
    nodes: dict[str, NodeState]

    @property
    def node_bytes(self) -> float:
        """Bytes both ways of a node, in the mean."""
        return fmean(each.up_bytes + each.down_bytes for each in self.nodes.values())

    @property
    def liar_pay(self) -> float:
        """The liar's share of all pay."""
        total = sum(each.pay for each in self.nodes.values())
        return self.nodes[f"n{LIAR}"].pay / total if total else 0.0


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
) -> Outcome:
    """Play a job."""
    with tempfile.TemporaryDirectory(prefix="hypergpu-bench-") as folder:
        job = MixtureJob(spec, Path(folder), lies or {}, absent)
        return Outcome(job.loss(), dict(job.nodes))


def expert_figures(*, is_quick: bool) -> PartFigures:
    """Train by whole and by partial replicas, and with a liar in four."""
    torch.set_num_threads(1)
    rounds, seeds = (3, (0,)) if is_quick else (ROUNDS, (0, 1))
    whole = [outcome_of(spec_of(0, seed=seed, rounds=rounds)) for seed in seeds]
    part = [outcome_of(spec_of(MIXTURE.held, seed=seed, rounds=rounds)) for seed in seeds]
    loss_ratio = fmean(each.loss for each in part) / fmean(each.loss for each in whole)
    two = [outcome_of(spec_of(held, rounds=rounds, per_token=2)) for held in (0, MIXTURE.held)]
    bytes_share = part[0].node_bytes / whole[0].node_bytes
    memory_share, peaks = _memory_share(4 if is_quick else 24)
    robust = spec_of(MIXTURE.held, rule="robust", rounds=rounds)
    honest = outcome_of(robust)
    # A job opens with the nodes that it states: without the liar it states one less.
    absent = outcome_of(_with_nodes(robust, NODES - 1), absent=frozenset({LIAR}))
    lying = {
        name: outcome_of(robust, {LIAR: lie})
        for name, lie in list(LIES.items())[: 1 if is_quick else None]
    }
    worst = max(each.loss for each in lying.values()) / absent.loss
    rows = [
        *(
            [
                f"held-out loss, {tokens}",
                f"{first.loss:.3f}",
                f"{second.loss:.3f}",
                f"{second.loss / first.loss:.3f}",
                "",
            ]
            for tokens, first, second in (
                *(("a token goes to one expert", *each) for each in zip(whole, part, strict=True)),
                ("a token goes to two", *two),
            )
        ),
        [
            "bytes of a node both ways",
            f"{whole[0].node_bytes / 1e6:.2f} MB",
            f"{part[0].node_bytes / 1e6:.2f} MB",
            f"{bytes_share:.3f}",
            "with the first model, which holders of a part fetch",
        ],
        [
            "peak memory that a mixture takes in training",
            f"{peaks[0] / 1e6:.0f} MB",
            f"{peaks[1] / 1e6:.0f} MB",
            f"{memory_share:.3f}",
            "of a larger one, so that torch itself is little",
        ],
        *(
            [
                f"a liar in four: {name}",
                f"{absent.loss:.3f}",
                f"{each.loss:.3f}",
                f"{each.loss / absent.loss:.3f}",
                f"{100 * each.liar_pay:.1f} % of all pay",
            ]
            for name, each in lying.items()
        ),
    ]
    metrics = {
        "experts_loss_ratio": loss_ratio,
        "experts_loss_ratio_two": two[1].loss / two[0].loss,
        "experts_bytes_share": bytes_share,
        "experts_memory_share": memory_share,
        "experts_honest_over_absent": honest.loss / absent.loss,
        "experts_liar_loss_ratio": worst,
        "experts_liar_pay": max(each.liar_pay for each in lying.values()),
    }
    note = (
        f"Partial replicas: {NODES} nodes hold {MIXTURE.held} of {MIXTURE.experts} experts, top"
        f" {MIXTURE.per_token}; beside them whole replicas. {rounds} rounds of {INNER_STEPS} steps"
        f" of {BATCH} x 32 bytes, int4 both ways, {len(seeds)} seeds (liars: one). Liars are beside"
        f" the job in which the liar is absent; the same node honest: {honest.loss:.3f}."
    )
    return PartFigures(rows=rows, metrics=metrics, notes=[note])


def _with_nodes(spec: JobSpec, nodes: int) -> JobSpec:
    return replace(spec, training=replace(spec.training, nodes=nodes))


def _memory_share(millions: int) -> tuple[float, tuple[int, int]]:
    """Peak memory of training with part of a mixture over that with all of it, measured in a
    process each.
    """
    whole, part = (_peak_bytes(held, millions) for held in (0, MIXTURE.held))
    return part / whole, (whole, part)


def _peak_bytes(held: int, millions: int) -> int:
    module = "benchmarks.ours.workloads.experts.peak"
    command = [sys.executable, "-m", module, str(held), str(millions), str(_PEAK_STEPS)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
