"""What liars do to a model and to pay: twenty nodes, up to eight of them attackers.

Attacks and classical rules are those of byzfl, and attacks of our own; codec, admission, sketches,
weighing, fold and pay are the product's. Jobs that were run are kept in ``build/trust`` until the
sources change, so that a long run can be stopped and goes on; the table of docs/trust.md is there,
too.

What is lost is lost against the job of the same seed and rule whose attackers are absent: the data
of liars are not there to be had. What is lost against the job in which they are honest is told,
too. Which jobs are run says `benchmarks.ours.trust.cells`: first the gravest attacks, then all of
them, whose figures take the place of the first ones.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean, median

from msgspec.structs import replace

from benchmarks.ours.table import BenchmarkParts, PartFigures
from benchmarks.ours.trust.attacks import (
    ABSENT,
    BACKDOOR,
    JUST_ENOUGH,
    LABEL_FLIP,
    NONE,
    SMALL_BACKDOOR,
)
from benchmarks.ours.trust.backdoor_defences import DEFENCES
from benchmarks.ours.trust.cells import (
    ALPHAS,
    BACKDOORS,
    CROWD,
    CROWD_ATTACKS,
    ELSEWHERE,
    EVEN,
    EVERY,
    FREE_RIDERS,
    HALF,
    MORE_CELLS,
    MOST,
    SKEWED,
    SPARSE,
    UNEQUAL,
    UNPAID,
    UNPAID_PERCENT,
    TrustGrid,
    defended_settings,
)
from benchmarks.ours.trust.costs import duplicates, fold_cost, malformed_messages, silent_nodes
from benchmarks.ours.trust.grid import KEPT, run_settings
from benchmarks.ours.trust.judging_cost import SMALL, judging_cost
from benchmarks.ours.trust.outcome import CODEC, HELD_OUT, ROBUST, ROUNDS, Outcome, Setting
from benchmarks.ours.trust.speeds import stated_speeds
from benchmarks.ours.trust.training import (
    BATCH,
    CHANNELS,
    INNER_STEPS,
    NODES,
    TRIAL_MOST,
    TRIAL_SAMPLES,
    WIDTH,
)

WORSE = 1.0
"""Points below the better of the others that count as worse."""
_WITHOUT_LIARS = (NONE, ABSENT)
_COLUMNS = (*MORE_CELLS, (MOST, SKEWED))
_QUICK = TrustGrid(
    seeds=(1,), attacks=(LABEL_FLIP, "under"), others=(LABEL_FLIP,), peers=(), has_others=False
)


def parts(is_quick: bool) -> BenchmarkParts:
    """Return the parts. Quick: one seed of two attacks, and smaller updates."""
    grids = {"gravest": _QUICK}
    if not is_quick:
        grids = {
            "skewed": UNEQUAL,
            "elsewhere": ELSEWHERE,
            "gravest": TrustGrid(),
            "attacks": EVERY,
        }
    defended_seeds = (1,) if is_quick else (1, 2, 3)
    return BenchmarkParts(
        title=f"Accuracy and pay among liars, {NODES} nodes, {ROUNDS} rounds of {INNER_STEPS}",
        columns=("attack", *_columns()),
        parts={
            **{name: partial(learning, grid) for name, grid in grids.items()},
            "backdoors": partial(backdoor_defences, defended_seeds),
            "fold": partial(fold_cost, *((1_000_000, 8) if is_quick else ())),
            "evaluator": partial(judging_cost, *(((SMALL,), 3) if is_quick else ())),
            "duplicates": duplicates,
            "silent": partial(silent_nodes, 1 if is_quick else 5),
            "speeds": stated_speeds,
            "malformed": malformed_messages,
        },
        notes=partial(_notes, next(iter(grids.values()))),
    )


def _notes(grid: TrustGrid) -> tuple[str, ...]:
    model = f"digits-mlp of width {WIDTH}, batch {BATCH}, AdamW, {CODEC}, Nesterov outside"
    few = f"{len(grid.usual_seeds)} elsewhere, one of others, the CNN, {SPARSE}, {CROWD} nodes"
    return (
        f"{model}; cnn: digits-cnn of {CHANNELS} channels.",
        f"{len(grid.seeds)} seeds at alpha {SKEWED}, {few}.",
        f"{TRIAL_SAMPLES} held-out samples for the rule, the others for the score.",
        "Each cell: accuracy in percent, and at robust the attackers' share of pay.",
    )


class Outcomes:
    """Means over seeds."""

    def __init__(self, grid: TrustGrid, found: Mapping[Setting, Outcome]) -> None:
        self._seeds = grid.seeds
        self._found = found

    def by_seed(self, key: Setting) -> dict[int, Outcome]:
        """Outcomes of a setting, whatever its seed, by the seeds it was run with."""
        settings = {seed: _of_seed(key, seed) for seed in self._seeds}
        return {seed: self._found[it] for seed, it in settings.items() if it in self._found}

    def all(self, key: Setting) -> list[Outcome]:
        """The same, without their seeds."""
        return list(self.by_seed(key).values())

    def accuracy(self, key: Setting) -> float:
        """In percent."""
        return fmean(each.accuracy for each in self.all(key))

    def points_lost(self, key: Setting, against: Setting) -> float:
        """Mean over the seeds of both of what ``key`` is below ``against``."""
        own, others = self.by_seed(key), self.by_seed(against)
        return fmean(others[seed].accuracy - own[seed].accuracy for seed in own.keys() & others)


def _of_seed(key: Setting, seed: int) -> Setting:
    return replace(key, seed=seed)


def robust(
    attack: str, percent: int, alpha: str, model: str = "mlp", codec: str = CODEC
) -> Setting:
    """The product's rule in a cell."""
    return Setting(ROBUST, attack, percent, alpha, 0, model, codec)


def mean_rule(attack: str, percent: int, alpha: str) -> Setting:
    """The plain mean in a cell."""
    return Setting("mean", attack, percent, alpha, 0)


def crowd(attack: str) -> Setting:
    """The product's rule among many nodes."""
    return replace(robust(attack, 0 if attack == NONE else MOST, HALF), nodes=CROWD)


def held_out_rule(attack: str, percent: int, alpha: str) -> Setting:
    """The product's rule of before in a cell."""
    return Setting(HELD_OUT, attack, percent, alpha, 0)


def learning(grid: TrustGrid) -> PartFigures:
    """Train the grid's jobs and sum them up."""
    figures = figures_of(grid, run_settings(grid.settings()))
    lines = (("attack", *_columns()), ("---",) * (1 + len(_columns())), *figures.rows)
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    (KEPT / "table.md").write_text(table, encoding="utf-8")
    return figures


def figures_of(grid: TrustGrid, found: Mapping[Setting, Outcome]) -> PartFigures:
    """Sum up the outcomes of all of a grid's jobs."""
    outcomes = Outcomes(grid, found)
    attacks = (*_WITHOUT_LIARS, *grid.attacks, *FREE_RIDERS)
    rows = [_row(grid, outcomes, each) for each in dict.fromkeys(attacks)]
    metrics = _skew_figures(grid, outcomes) if grid.has_skewed else {}
    if not grid.usual_seeds:
        return PartFigures(rows=rows, metrics=metrics)
    others = _of_others(grid, outcomes) if grid.has_others else PartFigures()
    return PartFigures(
        rows=[*rows, *others.rows],
        metrics={
            **_points_lost(grid, outcomes),
            **_beside_mean(grid, outcomes),
            **metrics,
            **_weights(grid, outcomes),
            **others.metrics,
        },
    )


def backdoor_defences(seeds: Sequence[int]) -> PartFigures:
    """What defences of the literature take off backdoors, and off accuracy, on top of the rule."""
    outcomes = run_settings(defended_settings(seeds))
    rows, metrics = [], {}
    for defence in ("", *DEFENCES):
        cells = {
            attack: [
                it for key, it in outcomes.items() if (key.defence, key.attack) == (defence, attack)
            ]
            for attack in (NONE, *BACKDOORS)
        }
        success = {attack: fmean(each.triggered for each in cells[attack]) for attack in BACKDOORS}
        accuracy = fmean(each.accuracy for each in cells[NONE])
        name = defence.replace(" ", "_").replace("'", "") or "none"
        metrics[f"backdoor_success_{name}"] = success[BACKDOOR]
        metrics[f"small_backdoor_success_{name}"] = success[SMALL_BACKDOOR]
        metrics[f"backdoor_clean_accuracy_{name}"] = accuracy
        success_cells = [f"{success[it]:.1f} %" for it in BACKDOORS]
        rows.append(
            [f"backdoors, {defence or 'no defence'}", *success_cells, f"{accuracy:.1f} clean"]
        )
    return PartFigures(rows=rows, metrics=metrics)


def _columns() -> list[str]:
    ours = [f"{alpha}, {percent} %" for percent, alpha in _COLUMNS]
    return [*ours, f"mean, {SKEWED}, {MOST} %", "byzfl's best"]


def _row(grid: TrustGrid, outcomes: Outcomes, attack: str) -> list[str]:
    def cell(key: Setting) -> str:
        cells = outcomes.all(key)
        if not cells:
            return ""
        mean_pay = fmean(each.attackers_pay for each in cells)
        is_paid = key.rule == ROBUST and attack not in _WITHOUT_LIARS
        return f"{outcomes.accuracy(key):.1f}" + (f" / {mean_pay:.2f}" if is_paid else "")

    def percent_of(percent: int) -> int:
        return 0 if attack == NONE else percent

    cells = [cell(robust(attack, percent_of(percent), alpha)) for percent, alpha in _COLUMNS]
    cells.append(cell(mean_rule(attack, percent_of(MOST), SKEWED)))
    if grid.peers and attack in (NONE, *grid.others):
        values = {
            rule: outcomes.accuracy(Setting(rule, attack, percent_of(MOST), SKEWED, 0))
            for rule in grid.peers
        }
        best = max(values, key=lambda rule: values[rule])
        cells.append(f"{values[best]:.1f} {best}")
    return [attack, *cells]


def _points_lost(grid: TrustGrid, outcomes: Outcomes) -> dict[str, float]:
    metrics = {}
    for percent in sorted({share for share, _ in grid.cells}):
        alphas = [alpha for share, alpha in grid.cells if share == percent]
        for key, other, share in (
            ("points_lost", ABSENT, percent),
            ("points_lost_to_honest", NONE, 0),
        ):
            metrics[f"{key}_{percent}"] = max(
                outcomes.points_lost(robust(attack, percent, alpha), robust(other, share, alpha))
                for attack in grid.attacks
                for alpha in alphas
                if grid.has(attack, (percent, alpha))
            )
    return metrics


def _beside_mean(grid: TrustGrid, outcomes: Outcomes) -> dict[str, float]:
    return {
        "tax_clean_points": max(
            outcomes.points_lost(robust(NONE, 0, alpha), mean_rule(NONE, 0, alpha))
            for alpha in grid.alphas
        ),
        "under_label_flip_vs_mean_points": min(
            -outcomes.points_lost(
                robust(LABEL_FLIP, MOST, alpha), mean_rule(LABEL_FLIP, MOST, alpha)
            )
            for alpha in grid.alphas
        ),
    }


def _skew_figures(grid: TrustGrid, outcomes: Outcomes) -> dict[str, float]:
    """Attacks on very unequal data where another rule is better by a point, over paired seeds, and
    what they earn.
    """
    clean = outcomes.all(robust(NONE, 0, SKEWED))
    attacks = (*grid.attacks, *FREE_RIDERS)
    all_outcomes = [each for it in attacks for each in outcomes.all(robust(it, MOST, SKEWED))]
    below = {
        attack: max(
            outcomes.points_lost(
                robust(attack, MOST, SKEWED), Setting(rule, attack, MOST, SKEWED, 0)
            )
            for rule in ("mean", *grid.peers)
        )
        for attack in grid.others
    }
    return {
        "skewed_worse_than_best": sum(each > WORSE for each in below.values()),
        "skewed_points_below_best": max(below.values()),
        "skewed_points_lost_40": max(
            outcomes.points_lost(robust(attack, MOST, SKEWED), absent)
            for attack in grid.attacks
            for absent in (robust(ABSENT, MOST, SKEWED), held_out_rule(ABSENT, MOST, SKEWED))
        ),
        "skewed_points_lost_40_before": max(
            outcomes.points_lost(held_out_rule(attack, MOST, SKEWED), absent)
            for attack in grid.attacks
            for absent in (robust(ABSENT, MOST, SKEWED), held_out_rule(ABSENT, MOST, SKEWED))
        ),
        "honest_weight_skewed": fmean(each.honest_weight for each in clean),
        "honest_pay_skewed": fmean(each.honest_pay for each in clean),
        "honest_banned_skewed": max(each.honest_banned for each in all_outcomes),
        "skewed_attackers_pay_40": _most_paid(outcomes, grid.attacks, (SKEWED,)),
        "skewed_attackers_pay_40_but_one": _most_paid(
            outcomes, [attack for attack in grid.attacks if attack != JUST_ENOUGH], (SKEWED,)
        ),
        "skewed_free_riders_pay_40": _most_paid(outcomes, FREE_RIDERS, (SKEWED,)),
        "skewed_clean_over_before_points": -outcomes.points_lost(
            robust(NONE, 0, SKEWED), held_out_rule(NONE, 0, SKEWED)
        ),
    }


def _weights(grid: TrustGrid, outcomes: Outcomes) -> dict[str, float]:
    """Votes that honest nodes keep and attackers lose, and what these are paid."""
    cells = [
        (attack, *cell) for attack in grid.attacks for cell in grid.cells if grid.has(attack, cell)
    ]
    cells += [(attack, UNPAID_PERCENT, HALF) for attack in UNPAID]
    all_outcomes = [each for cell in cells for each in outcomes.all(robust(*cell))]
    clean = {alpha: outcomes.all(robust(NONE, 0, alpha)) for alpha in grid.alphas}
    all_clean = [each for of_alpha in clean.values() for each in of_alpha]
    return {
        **{
            f"honest_weight_{name}": fmean(each.honest_weight for each in clean[alpha])
            for name, alpha in (("iid", EVEN), ("half", HALF))
        },
        "honest_banned": max(each.honest_banned for each in (*all_outcomes, *all_clean)),
        "honest_pay_even": fmean(each.honest_pay for each in clean[EVEN]),
        "honest_pay_half": fmean(each.honest_pay for each in clean[HALF]),
        "attackers_pay_40": _most_paid(outcomes, grid.attacks),
        "free_riders_pay_40": _most_paid(outcomes, FREE_RIDERS),
        "rounds_to_ban_median": median(
            rounds for it in all_outcomes for rounds in it.rounds_to_ban
        ),
        "attackers_pay": max(
            fmean(each.attackers_pay for each in outcomes.all(robust(attack, UNPAID_PERCENT, HALF)))
            for attack in UNPAID
        ),
    }


def _most_paid(outcomes: Outcomes, attacks: Sequence[str], alphas: Sequence[str] = ALPHAS) -> float:
    """The largest share of all pay by two nodes of five, of all attacks and data."""
    shares = [
        fmean(each.attackers_pay for each in all_found)
        for attack in attacks
        for alpha in alphas
        if (all_found := outcomes.all(robust(attack, MOST, alpha)))
    ]
    return max(shares, default=0.0)


def _of_others(grid: TrustGrid, outcomes: Outcomes) -> PartFigures:
    """Backdoors, the CNN and sparse updates."""
    rows, metrics = _of_backdoors(outcomes)
    many_rows, many_metrics = _of_crowd(outcomes)
    rows, metrics = [*rows, *many_rows], {**metrics, **many_metrics}
    rows += [
        [
            f"128 held-out samples, {rule}: {attack}",
            f"{outcomes.accuracy(replace(key, held_out=TRIAL_MOST)):.1f}",
        ]
        for rule in (ROBUST, HELD_OUT)
        for attack, percent in ((NONE, 0), (ABSENT, MOST), (LABEL_FLIP, MOST))
        if grid.has_skewed
        for key in [Setting(rule, attack, percent, SKEWED, 0)]
    ]
    kinds = (("cnn", "cnn", CODEC, grid.others), ("topk", "mlp", SPARSE, grid.attacks))
    for name, model, codec, attacks in kinds:
        absent = robust(ABSENT, MOST, HALF, model, codec)
        points_lost = {
            attack: outcomes.points_lost(robust(attack, MOST, HALF, model, codec), absent)
            for attack in attacks
        }
        clean = outcomes.accuracy(robust(NONE, 0, HALF, model, codec))
        rows.append([f"{name}: honest, absent", f"{clean:.1f}", f"{outcomes.accuracy(absent):.1f}"])
        rows += [
            [f"{name}: points lost, {attack}", f"{it:.1f}"] for attack, it in points_lost.items()
        ]
        metrics[f"{name}_points_lost_40"] = max(points_lost.values())
    return PartFigures(rows=rows, metrics=metrics)


def _of_backdoors(outcomes: Outcomes) -> tuple[list[list[str]], dict[str, float]]:
    """How often triggers work, planted on a half of each batch and on a tenth."""
    rows, metrics = [], {}
    for key, attack, percent in (
        ("backdoor_success_0", NONE, 0),
        *((f"backdoor_success_{it}", BACKDOOR, it) for it in (UNPAID_PERCENT, MOST)),
        *((f"small_backdoor_success_{it}", SMALL_BACKDOOR, it) for it in (UNPAID_PERCENT, MOST)),
    ):
        of_key = outcomes.all(robust(attack, percent, HALF))
        metrics[key] = fmean(each.triggered for each in of_key)
        pay = fmean(each.attackers_pay for each in of_key)
        rows.append([f"{attack} works, {percent} %", f"{metrics[key]:.1f} %", f"pay {pay:.2f}"])
    return rows, metrics


def _of_crowd(outcomes: Outcomes) -> tuple[list[list[str]], dict[str, float]]:
    """Many nodes, of which some are looked at in a round."""
    rows = []
    for attack in (NONE, ABSENT, *CROWD_ATTACKS):
        (one,) = outcomes.all(crowd(attack))
        pay = f"pay {one.attackers_pay:.3f}, honest {one.honest_pay:.2f}"
        rows.append([f"{CROWD} nodes: {attack}", f"{one.accuracy:.1f}", pay])
    return rows, {
        "crowd_points_lost_40": max(
            outcomes.points_lost(crowd(attack), crowd(ABSENT)) for attack in CROWD_ATTACKS
        ),
        "crowd_pay_40": max(
            each.attackers_pay for attack in CROWD_ATTACKS for each in outcomes.all(crowd(attack))
        ),
        "crowd_honest_pay": fmean(each.honest_pay for each in outcomes.all(crowd(NONE))),
    }
