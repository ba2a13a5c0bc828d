"""Jobs among liars, with byzfl's attacks and rules, in an environment that has both.

Reads settings as lines of JSON and answers each with a line of figures.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

import byzfl
import msgspec
import numpy as np
import torch

from benchmarks.ours.trust.attacks import ATTACKS, Attack, RoundView
from benchmarks.ours.trust.byzfl_names import BYZFL_ATTACKS, MIXED
from benchmarks.ours.trust.outcome import Setting
from benchmarks.ours.trust.simulated import Machinery, Rule, train_job
from benchmarks.ours.trust.training import Rows, digits_workload, held_out_parts
from hypergpu.tensors.layout import Float32s

_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108, PTH112
"""Where the files of a job are, which a disk would make slow."""
_Byzfl = Callable[[Rows], Float32s]
"""An attack of byzfl: the forged update, of the honest ones."""


def _alike(make: Callable[[RoundView], _Byzfl]) -> Attack:
    """All attackers send what byzfl makes of the honest updates."""

    def attack(view: RoundView) -> Rows:
        forged_row = np.asarray(make(view)(view.honest), np.float32)
        return np.repeat(forged_row[None], len(view.own), axis=0)

    return attack


def _apart(make: Callable[[RoundView], _Byzfl]) -> Attack:
    """The same, but for noise that keeps them from being taken for copies."""
    return lambda view: view.spread(np.asarray(make(view)(view.honest), np.float32))


def _optimal(kind: Callable[..., _Byzfl]) -> Callable[[RoundView], _Byzfl]:
    return lambda view: kind(agg=view.target, pre_agg_list=[], f=len(view.own))


def _gaussian(view: RoundView) -> Rows:
    np.random.seed(int(view.draws.integers(2**31)))  # noqa: NPY002 - byzfl draws from there
    attack = byzfl.Gaussian()
    return np.stack([attack(view.honest) for _ in view.own]).astype(np.float32)


def _attacks() -> Mapping[str, Attack]:
    ipm = _optimal(byzfl.Optimal_InnerProductManipulation)
    alie = _optimal(byzfl.Optimal_ALittleIsEnough)
    theirs = (
        _alike(lambda _: byzfl.SignFlipping()),
        _alike(lambda _: byzfl.InnerProductManipulation(5.0)),
        _alike(lambda _: byzfl.ALittleIsEnough(1.5)),
        _alike(ipm),
        _alike(alie),
        _apart(ipm),
        _apart(alie),
        _alike(lambda _: byzfl.Mimic(0)),
        _gaussian,
        _alike(lambda _: byzfl.Inf()),
    )
    return {**ATTACKS, **dict(zip(BYZFL_ATTACKS, theirs, strict=True))}


def _centred_clipping() -> Rule:
    """Clipped at the median length, around the aggregate of the round before."""
    rule = byzfl.CenteredClipping(L=3)

    def aggregate(rows: Rows) -> Float32s:
        rule.tau = float(np.median(np.linalg.norm(rows, axis=1)))
        vector: Float32s = rule(rows)
        return vector

    return aggregate


def _rules() -> Mapping[str, Callable[[int], Rule]]:
    plain: Mapping[str, Callable[[int], Rule]] = {
        "trimmed mean": byzfl.TrMean,
        "Multi-Krum": byzfl.MultiKrum,
        "geometric median": lambda _: byzfl.GeometricMedian(),
        "centred clipping": lambda _: _centred_clipping(),
    }

    def mix(make: Callable[[int], Rule], count: int) -> Rule:
        rule, mix = make(count), byzfl.NNM(count)
        return lambda rows: rule(mix(rows))

    return {**plain, **{f"{MIXED}{name}": partial(mix, make) for name, make in plain.items()}}


@cache
def _machinery(model: str, held_out: int) -> Machinery:
    workload = digits_workload(model)
    return Machinery(workload, held_out_parts(workload, held_out), _attacks(), _rules())


def main() -> int:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    for line in sys.stdin.buffer:
        setting = msgspec.json.decode(line, type=Setting)
        with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:
            machinery = _machinery(setting.model, setting.held_out)
            outcome = train_job(machinery, setting, Path(folder))
        answers.write(msgspec.json.encode(outcome) + b"\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
