"""Samples to a held-out loss: rounds of local steps against synchronising every step, each with
both inner optimizers.

Eight nodes share this process; trainer, codec, outer step and fold are the product's own, and only
the network between them is left out. Learning rates are the best of a search by factors of two: on
seed 1, and of the CNN by rounds on all seeds, since the best on seed 1 was no good on another.
"""

from functools import partial

import torch

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.samples.training import (
    ADAMW,
    BATCH,
    CODEC,
    HELD_OUT_MOST,
    MUON,
    NODES,
    OPTIMIZERS,
    TASKS,
    RoundWay,
    SampleTask,
    TrainingRun,
    samples_to,
)
from benchmarks.ours.samples.variants import (
    count_list,
    middle_of,
    ratio_cell,
    schedule_figures,
    unequal_figures,
)
from benchmarks.ours.table import BenchmarkParts, PartFigures


def task_figures(name: str, seeds: int) -> PartFigures:
    """Samples of both optimizers, synchronised every step and by rounds.

    Raises:
        BenchmarkError: Synchronous AdamW, which all else is compared with, missed the target.
    """
    torch.set_num_threads(1)
    task = TASKS[name]
    counts: dict[tuple[str, str], list[int | None]] = {}
    for optimizer in OPTIMIZERS:
        for way, rates in (("sync", task.sync_rates), ("rounds", task.round_rates)):
            counts[way, optimizer] = [
                _samples(task, way, optimizer, rates[optimizer], seed)
                for seed in range(1, seeds + 1)
            ]
    baseline = middle_of(counts["sync", ADAMW])
    if baseline is None:
        raise BenchmarkError(f"synchronous AdamW missed a loss of {task.target:g}")
    rows, metrics = [], {}
    for (way, optimizer), sample_counts in counts.items():
        middle = middle_of(sample_counts)
        over_adamw = None if middle is None else middle / baseline
        row_name = "every step" if way == "sync" else f"H={task.inner_steps}, {CODEC}"
        cells = (count_list(sample_counts), ratio_cell(over_adamw))
        if over_adamw is not None and (way, optimizer) != ("sync", ADAMW):
            metrics[f"{name}_{way}_{optimizer}_over_sync_adamw"] = over_adamw
        rows.append((f"{task.title}: {row_name}, {optimizer}", *cells))
    rounds_muon, sync_muon = (middle_of(counts[way, MUON]) for way in ("rounds", "sync"))
    if rounds_muon is not None and sync_muon is not None:
        metrics[f"{name}_rounds_muon_over_sync_muon"] = rounds_muon / sync_muon
    return PartFigures(rows=rows, metrics=metrics, notes=[_note(task)])


def _samples(
    task: SampleTask, way: str, optimizer: str, learning_rate: float, seed: int
) -> int | None:
    run = TrainingRun(task, optimizer, seed)
    points = (
        run.synchronous(learning_rate) if way == "sync" else run.rounds(RoundWay(learning_rate))
    )
    return samples_to(task.target, points)


def _note(task: SampleTask) -> str:
    rates = "; ".join(
        f"{way} {', '.join(f'{name} {rate:g}' for name, rate in rates.items())}"
        for way, rates in (("every step", task.sync_rates), ("rounds", task.round_rates))
    )
    return f"{task.title}: loss {task.target:g}; learning rates: {rates}."


def parts(is_quick: bool) -> BenchmarkParts:
    """A part for each task, and for two other ways of the GPT's rounds."""
    seeds = 1 if is_quick else 3
    return BenchmarkParts(
        title=f"Samples to a held-out loss, {NODES} nodes of batch {BATCH}",
        columns=("task and way", "samples, by seed", "over the first"),
        parts={
            **{name: partial(task_figures, name, seeds) for name in TASKS},
            "unequal": partial(unequal_figures, seeds),
            "schedule": partial(schedule_figures, seeds),
        },
        notes=lambda: [
            f"{seeds} seeds; loss of {HELD_OUT_MOST} held-out samples.",
            "The outer step is the project's own choice of each round.",
        ],
    )
