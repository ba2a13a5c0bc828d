"""What liars do to a model and to pay: twenty nodes, up to eight of them attackers.

Attacks and classical rules are those of byzfl, and attacks of our own; codec, admission, sketches,
weighing, fold and pay are the product's. What was lost is lost against the same seed without
attackers under the same rule. Jobs that were run are kept in ``build/trust`` until the sources
change, so that a long run can be stopped and goes on.
"""

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from rich.console import Console

from benchmarks.ours.table import ResultTable, print_table
from benchmarks.ours.trust.attacks import ATTACKS, LABEL_FLIP, NONE
from benchmarks.ours.trust.byzfl_names import BYZFL_ATTACKS, BYZFL_RULES
from benchmarks.ours.trust.grid import run_settings
from benchmarks.ours.trust.simulated import OWN_RULES, ROUNDS, Outcome, Setting
from benchmarks.ours.trust.training import BATCH, INNER_STEPS, NODES, TRIAL_SAMPLES, WIDTH

PERCENTS = (20, 30, 40)
EVEN, SKEWED = ("inf", "0.5"), "0.1"
ALL_ATTACKS = (*ATTACKS, *BYZFL_ATTACKS)
UNPAID = (
    "flip x10",
    "scale x10",
    "noise",
    "zeros",
    "echo",
    "replay",
    "copies",
    "useless copies",
    "sign flip (byzfl)",
)
"""Attacks by which nobody should earn."""
UNPAID_PERCENT = 20
PEER_PERCENT = 40
"""Attackers where byzfl's rules stand beside ours: they are eight, and told the true number."""
WORSE = 1.0
"""Points below the better of the others that count as worse."""


class TrustGrid(NamedTuple):
    """Runs of the table."""

    seeds: Sequence[int] = range(1, 6)
    peer_seeds: Sequence[int] = range(1, 3)
    attacks: Sequence[str] = ALL_ATTACKS
    alphas: Sequence[str] = (*EVEN, SKEWED)
    percents: Sequence[int] = PERCENTS
    peers: Sequence[str] = BYZFL_RULES

    def settings(self) -> list[Setting]:
        """All jobs, whole seeds first."""
        return [
            setting
            for seed in self.seeds
            for setting in (*self._of_ours(seed), *self._of_peers(seed))
        ]

    def _of_ours(self, seed: int) -> Iterable[Setting]:
        for alpha, percent in itertools.product(self.alphas, self.percents):
            yield from (Setting(rule, NONE, 0, alpha, seed) for rule in OWN_RULES)
            for attack in self.attacks:
                is_beside_mean = alpha == SKEWED or attack == LABEL_FLIP
                for rule in OWN_RULES if is_beside_mean else ("robust",):
                    yield Setting(rule, attack, percent, alpha, seed)

    def _of_peers(self, seed: int) -> Iterable[Setting]:
        if not (SKEWED in self.alphas and PEER_PERCENT in self.percents):
            return
        for rule in self.peers if seed in self.peer_seeds else ():
            yield Setting(rule, NONE, 0, SKEWED, seed)
            for attack in self.attacks:
                yield Setting(rule, attack, PEER_PERCENT, SKEWED, seed)


class Outcomes:
    """Means over seeds."""

    def __init__(self, grid: TrustGrid, found: Mapping[Setting, Outcome]) -> None:
        self._grid = grid
        self._found = found

    def all(self, rule: str, attack: str, percent: int, alpha: str) -> list[Outcome]:
        """One for each seed that was run."""
        settings = (Setting(rule, attack, percent, alpha, seed) for seed in self._grid.seeds)
        return [self._found[each] for each in settings if each in self._found]

    def accuracy(self, rule: str, attack: str, percent: int, alpha: str) -> float:
        """In percent."""
        return fmean(each.accuracy for each in self.all(rule, attack, percent, alpha))

    def loss_points(self, attack: str, percent: int, alpha: str, *, clean: str = "robust") -> float:
        """Points that an attack costs, against no attack under the rule ``clean``."""
        return self.accuracy(clean, NONE, 0, alpha) - self.accuracy(
            "robust", attack, percent, alpha
        )

    def by_seed(self, rule: str, attack: str) -> dict[int, float]:
        """Accuracy by seed where byzfl's rules were run."""
        return {
            seed: self._found[setting].accuracy
            for seed in self._grid.peer_seeds
            if (setting := Setting(rule, attack, PEER_PERCENT, SKEWED, seed)) in self._found
        }


def run(quick: bool) -> ResultTable:
    """Train all jobs; quick: one seed of the gravest attacks."""
    return measure(QUICK if quick else TrustGrid())


GRAVE = (
    "flip x10",
    LABEL_FLIP,
    "under",
    "late",
    "optimal IPM apart (byzfl)",
    "optimal ALIE apart (byzfl)",
)
QUICK = TrustGrid(seeds=(1,), attacks=GRAVE, alphas=("inf", SKEWED), percents=(20, 40), peers=())


def measure(grid: TrustGrid) -> ResultTable:
    """Run a grid and sum it up."""
    outcomes = Outcomes(grid, run_settings(grid.settings()))
    return ResultTable(
        title=f"Accuracy among liars, {NODES} nodes, {ROUNDS} rounds of {INNER_STEPS} steps",
        columns=("attack", *_columns(grid)),
        rows=[_row(grid, outcomes, attack) for attack in (NONE, *grid.attacks)],
        metrics=_metrics(grid, outcomes),
        notes=(
            f"digits-mlp of width {WIDTH}, batch {BATCH}, AdamW, int4 both ways, Nesterov outside.",
            f"{len(grid.seeds)} seeds; byzfl's rules with {len(grid.peer_seeds)} of them.",
            f"{TRIAL_SAMPLES} held-out samples for the rule, the others for the score.",
            "Each cell: accuracy in percent, and at robust the attackers' share of pay.",
        ),
        is_partial=grid != TrustGrid(),
    )


def _columns(grid: TrustGrid) -> list[str]:
    ours = [f"{alpha} {percent} %" for alpha in grid.alphas for percent in grid.percents]
    if SKEWED not in grid.alphas:
        return ours
    means = [f"mean {SKEWED} {percent} %" for percent in grid.percents]
    return [*ours, *means, *(["byzfl's best"] if grid.peers else [])]


def _row(grid: TrustGrid, outcomes: Outcomes, attack: str) -> list[str]:
    def cell(rule: str, alpha: str, percent: int) -> str:
        percent = percent if attack != NONE else 0
        found = outcomes.all(rule, attack, percent, alpha)
        paid = fmean(each.attackers_pay for each in found)
        pay = f" {paid:.2f}" if rule == "robust" and attack != NONE else ""
        return f"{fmean(each.accuracy for each in found):.1f}{pay}"

    cells = [cell("robust", alpha, percent) for alpha in grid.alphas for percent in grid.percents]
    if SKEWED in grid.alphas:
        cells += [cell("mean", SKEWED, percent) for percent in grid.percents]
        if grid.peers:
            name, value = _best_peer(grid, outcomes, attack)
            cells.append(f"{value:.1f} {name}")
    return [attack, *cells]


def _best_peer(grid: TrustGrid, outcomes: Outcomes, attack: str) -> tuple[str, float]:
    percent = PEER_PERCENT if attack != NONE else 0
    values = {rule: outcomes.accuracy(rule, attack, percent, SKEWED) for rule in grid.peers}
    best = max(values, key=lambda rule: values[rule])
    return best, values[best]


def _metrics(grid: TrustGrid, outcomes: Outcomes) -> dict[str, float]:
    even = [alpha for alpha in grid.alphas if alpha in EVEN]
    metrics: dict[str, float] = {}
    for percent in grid.percents:
        for key, clean in (("points_lost", "robust"), ("points_lost_to_clean_mean", "mean")):
            metrics[f"{key}_{percent}"] = max(
                outcomes.loss_points(attack, percent, alpha, clean=clean)
                for attack in grid.attacks
                for alpha in even
            )
    metrics["tax_clean_points"] = max(
        outcomes.accuracy("mean", NONE, 0, alpha) - outcomes.accuracy("robust", NONE, 0, alpha)
        for alpha in grid.alphas
    )
    if LABEL_FLIP in grid.attacks:
        metrics["under_label_flip_vs_mean_points"] = min(
            outcomes.accuracy("robust", LABEL_FLIP, percent, alpha)
            - outcomes.accuracy("mean", LABEL_FLIP, percent, alpha)
            for percent in grid.percents
            for alpha in grid.alphas
        )
    unpaid = [attack for attack in UNPAID if attack in grid.attacks]
    if unpaid and UNPAID_PERCENT in grid.percents:
        metrics["attackers_pay"] = max(
            fmean(it.attackers_pay for it in outcomes.all("robust", attack, UNPAID_PERCENT, alpha))
            for attack in unpaid
            for alpha in even
        )
    return {**metrics, **_weights(grid, outcomes), **_skew_metrics(grid, outcomes)}


def _weights(grid: TrustGrid, outcomes: Outcomes) -> dict[str, float]:
    """Weights that honest nodes keep, and how soon attackers lose theirs."""
    bans = [
        rounds
        for alpha in grid.alphas
        for percent in grid.percents
        for attack in grid.attacks
        for each in outcomes.all("robust", attack, percent, alpha)
        for rounds in each.rounds_to_ban
    ]
    names = {"inf": "iid", SKEWED: "skewed"}
    return {
        "rounds_to_ban_median": median(bans),
        "honest_banned": max(
            fmean(each.honest_banned for each in outcomes.all("robust", NONE, 0, alpha))
            for alpha in grid.alphas
        ),
        **{
            f"honest_weight_{names[alpha]}": fmean(
                each.honest_weight for each in outcomes.all("robust", NONE, 0, alpha)
            )
            for alpha in grid.alphas
            if alpha in names
        },
    }


def _skew_metrics(grid: TrustGrid, outcomes: Outcomes) -> dict[str, float]:
    """Attacks on very unequal data where another rule is better by a point, over the same seeds."""
    if SKEWED not in grid.alphas or PEER_PERCENT not in grid.percents:
        return {}
    worse = 0
    for attack in grid.attacks:
        own = outcomes.accuracy("robust", attack, PEER_PERCENT, SKEWED)
        others = [outcomes.accuracy("mean", attack, PEER_PERCENT, SKEWED) - own]
        paired = outcomes.by_seed("robust", attack)
        for rule in grid.peers:
            theirs = outcomes.by_seed(rule, attack)
            others.append(fmean(theirs[seed] - paired[seed] for seed in theirs))
        worse += max(others) > WORSE
    return {"skewed_worse_than_best": worse}


def main() -> None:
    """Run a part of the grid and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trust", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="how many (5)")
    parser.add_argument("--peer-seeds", type=int, default=2, help="how many for byzfl's rules (2)")
    parser.add_argument("--attacks", help="names, separated by commas (all)")
    parser.add_argument("--alphas", default=",".join((*EVEN, SKEWED)))
    parser.add_argument("--percents", default=",".join(map(str, PERCENTS)))
    parser.add_argument("--no-peers", action="store_true", help="without byzfl's rules")
    options = parser.parse_args()
    attacks = tuple(options.attacks.split(",")) if options.attacks else ALL_ATTACKS
    if unknown := set(attacks) - set(ALL_ATTACKS):
        parser.error(f"no attack {', '.join(sorted(unknown))}; there are: {', '.join(ALL_ATTACKS)}")
    table = measure(
        TrustGrid(
            seeds=range(1, options.seeds + 1),
            peer_seeds=range(1, min(options.seeds, options.peer_seeds) + 1),
            attacks=attacks,
            alphas=tuple(options.alphas.split(",")),
            percents=tuple(int(each) for each in options.percents.split(",")),
            peers=() if options.no_peers else BYZFL_RULES,
        )
    )
    console = Console(width=240)
    print_table(table, console)
    for key, value in table.metrics.items():
        console.print(f"{key} {value:.3f}", highlight=False)


if __name__ == "__main__":
    main()
