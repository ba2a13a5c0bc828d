"""What the rule costs where nobody lies, and what strangers may cost without a lie in an update."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.silent_nodes import silent_nodes_slowdown
from benchmarks.ours.table import PartFigures
from benchmarks.ours.trust.duplicates import (
    SEEDS,
    UNEQUAL,
    duplicate_share,
    trusted_share,
)
from benchmarks.peers.seconds import ROOT
from coordinator.core.training.job.commands import FoldedUpdate
from coordinator.core.training.job.trust_memory import TrustMemory
from coordinator.shell.aggregation.evidence import SketchedUpdate, weigh_sketched
from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.fold_request import FoldRequest, StoredBlob, StoredUpdate
from coordinator.shell.aggregation.measurements import HeldOutGradient
from coordinator.shell.aggregation.sketch import SketchKey, sketch_update, sketch_vector
from coordinator.shell.kinds.training.aggregation import weighted_updates
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of_file
from hypergpu.ids import NodeId, Slot
from hypergpu.jobfile.spec import Outer
from hypergpu.tensors.codec import encode_update
from hypergpu.tensors.layout import Flat, Float32s, Layout, TensorSpec, layout_of
from hypergpu.units import Bytes

_CODEC = "int4"
_KEY = SketchKey(b"benchmark")
_MESSAGES = 100_000
_REPEATS = 3
_STEPS = 20


class _Admitted(NamedTuple):
    """An update on disk, as admission leaves it."""

    folded: FoldedUpdate
    sketched: SketchedUpdate
    cpu_s: float
    """CPU seconds that its sketch took."""


class _AdmittedRound(NamedTuple):
    """What a closed round is folded of."""

    layout: Layout
    base: StoredBlob
    gradient: HeldOutGradient
    updates: Sequence[_Admitted]


def fold_cost(parameters: int = 25_000_000, updates: int = 32) -> PartFigures:
    """Weighing and folding against folding alone, by turns, and the CPU time of the sketches."""
    layout = layout_of([TensorSpec("weight", (parameters,))])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draws = np.random.default_rng(0)
        common = draws.standard_normal(parameters, np.float32)
        (folder / "base").write_bytes(common.data)
        base = StoredBlob(folder / "base", digest_of_file(folder / "base"))
        gradient = HeldOutGradient(base.digest, 1.0, sketch_vector(_KEY, layout, common))
        admissions = []
        for slot in range(updates):
            values = common + draws.standard_normal(parameters, np.float32)
            admissions.append(_admit(layout, folder, slot, values))
        round_ = _AdmittedRound(layout, base, gradient, admissions)
        costs_s = [(_spend(round_, "mean"), _spend(round_, "robust")) for _ in range(_REPEATS)]
    plain_s, robust_s = (min(each[place] for each in costs_s) for place in range(2))
    sketch_s = fmean(each.cpu_s for each in admissions)
    size = f"{updates} {_CODEC} updates of {parameters / 1e6:.0f}M"
    return PartFigures(
        rows=[
            ["a fold, the plain mean, CPU s", f"{plain_s:.2f}"],
            ["a fold, weighed, CPU s", f"{robust_s:.2f}", f"{robust_s / plain_s:.2f}x"],
            ["a sketch at admission, CPU s", f"{sketch_s:.3f}"],
        ],
        metrics={"fold_over_plain": robust_s / plain_s, "sketch_cpu_s": sketch_s},
        notes=[f"Fold: {size}; sketches are there; least CPU seconds of {_REPEATS}, by turns."],
    )


def _admit(layout: Layout, folder: Path, slot: int, values: Float32s) -> _Admitted:
    flat = Flat(values, np.empty(0, np.float32), np.empty(0, np.int64))
    path = folder / f"update-{slot}"
    path.write_bytes(encode_update(layout, _CODEC, flat).payload.tobytes())
    started_s = time.process_time()
    sketch = sketch_update(_KEY, layout, _CODEC, path, folder / "base")
    cpu_s = time.process_time() - started_s
    node = NodeId(f"{slot:032x}")
    folded_update = FoldedUpdate(
        node=node,
        slot=Slot(slot),
        blob=BlobRef(digest_of_file(path), Bytes(path.stat().st_size)),
        weight=_STEPS,
        codec=_CODEC,
        inner_steps=_STEPS,
    )
    return _Admitted(folded_update, SketchedUpdate(node, _STEPS, sketch), cpu_s)


def _spend(round_: _AdmittedRound, rule: str) -> float:
    """CPU seconds of weighing and folding."""
    started_s = time.process_time()
    sketches = [each.sketched for each in round_.updates]
    weighing = weigh_sketched(TrustMemory(), rule, sketches, round_.gradient)
    terms = weighted_updates([each.folded for each in round_.updates], weighing)
    if len(terms) != len(sketches):
        raise BenchmarkError(f"{rule} folds {len(terms)} of {len(sketches)} honest updates")
    folder = round_.base.path.parent
    fold_result = fold(
        FoldRequest(
            layout=round_.layout,
            down=_CODEC,
            outer=Outer(),
            base_model=round_.base,
            outer_state=None,
            updates=tuple(
                StoredUpdate(
                    folder / f"update-{it.slot}", it.blob.digest, it.weight, it.codec, it.clip
                )
                for it in terms
            ),
            output_dir=folder,
        )
    )
    spent_s = time.process_time() - started_s
    for file in fold_result.files:
        file.path.unlink()
    return spent_s


def duplicates() -> PartFigures:
    """Share of all work that secret duplicates do twice, or leave undone to compare speeds."""
    share = fmean(duplicate_share(seed) for seed in range(SEEDS))
    unequal = fmean(duplicate_share(seed, UNEQUAL) for seed in range(SEEDS))
    trusted_rate = fmean(trusted_share(seed, UNEQUAL) for seed in range(SEEDS))
    return PartFigures(
        rows=[
            ["work done twice by secret duplicates", f"{100 * share:.2f} %"],
            ["the same, and work left undone, speeds of 1 : 16", f"{100 * unequal:.2f} %"],
            ["the same, nodes that are trusted", f"{100 * trusted_rate:.2f} %"],
        ],
        metrics={
            "duplicate_share": share,
            "duplicate_share_unequal": unequal,
            "duplicate_share_trusted": trusted_rate,
        },
    )


def silent_nodes(seeds: int = 5) -> PartFigures:
    """How much longer jobs take beside nodes that heartbeat and never work."""
    ratios_by_strategy = {
        strategy: [silent_nodes_slowdown(seed, strategy=strategy) for seed in range(seeds)]
        for strategy in ("diloco", "aware")
    }
    return PartFigures(
        rows=[
            [f"30 % silent, {strategy}, time", f"{max(ratios):.2f}x", f"{fmean(ratios):.2f}x mean"]
            for strategy, ratios in ratios_by_strategy.items()
        ],
        metrics={
            "silent_nodes_slowdown": max(ratios_by_strategy["diloco"]),
            "silent_nodes_slowdown_aware": max(ratios_by_strategy["aware"]),
        },
        notes=[f"Silent nodes: 50 rounds in virtual time, the worst of {seeds} seeds."],
    )


def malformed_messages() -> PartFigures:
    """Parsers that strangers reach, fed with malformed input: those that end in anything else than
    a precise error.
    """
    command = [sys.executable, "-m", "pytest", "-q", "tests/properties/test_malformed.py"]
    environment = {**os.environ, "FUZZ_MESSAGES": str(_MESSAGES)}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    if run.returncode not in {0, 1}:
        raise BenchmarkError(f"the property of malformed input did not run: {run.stdout[-500:]}")
    crashes = sum(line.startswith("FAILED") for line in run.stdout.splitlines())
    return PartFigures(
        rows=[["crashes by malformed messages", f"{crashes} of {_MESSAGES:,}"]],
        metrics={"malformed_crashes": float(crashes)},
    )
