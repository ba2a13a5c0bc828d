"""The order of a comparison, and the runs of netsim that it takes. Pure."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hypergpu.jobfile.problem import join_words, nearest
from hypergpu.jobfile.spec import STRATEGIES
from hypergpu.terminal.failure import usage_error

BACKENDS = ("proxy", "tunnel", "tc")
NAIVE = "sync"
"""What everything is measured against, where it is among the strategies."""


class ComparisonOrder(NamedTuple):
    """A comparison as it was asked for."""

    job: Path
    world: Path
    strategies: tuple[str, ...]
    seeds: int
    """Runs a strategy, by the seeds from 1 on."""
    backend: str
    target: float | None
    """None: the job's own."""
    out: Path
    sync_steps: int
    """Inner steps of `sync` that are measured over the links; 0: all that it takes."""
    worker: str
    give_up_after_s: float

    @property
    def baseline(self) -> str:
        """The strategy that the others are told in multiples of."""
        return NAIVE if NAIVE in self.strategies else self.strategies[0]


class Errand(NamedTuple):
    """One run of netsim."""

    name: str
    strategy: str
    seed: int
    words: tuple[str, ...]
    """Arguments of `netsim run`, without its output folder."""


def checked_order(order: ComparisonOrder) -> ComparisonOrder:
    """The same order, once it can be meant.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, a word in it names nothing.
    """
    for strategy in order.strategies:
        if strategy not in STRATEGIES:
            meant = nearest(strategy, STRATEGIES)
            fix = f'did you mean "{meant}"?' if meant else f"choose from {join_words(STRATEGIES)}"
            raise usage_error(f'there is no strategy "{strategy}"', fix)
    if not order.strategies:
        raise usage_error("there is nothing to compare", "name some: --strategies sync,aware")
    if len(set(order.strategies)) < len(order.strategies):
        raise usage_error("a strategy is named twice", "name each once")
    if order.backend not in BACKENDS:
        detail = f"--backend {order.backend}: nothing is trained there"
        raise usage_error(detail, f"choose one of {join_words(BACKENDS)}")
    return order


def strategy_words(text: str) -> tuple[str, ...]:
    """Strategies out of ``sync,diloco``."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def is_extrapolated(order: ComparisonOrder, strategy: str) -> bool:
    """Whether a strategy's time is worked out from the seconds that one of its steps takes."""
    return strategy == NAIVE and order.sync_steps > 0


def errands(order: ComparisonOrder, strategy: str, seed: int) -> tuple[Errand, ...]:
    """The runs behind one number: one; or for `sync` its steps on a LAN, and their time here."""
    if not is_extrapolated(order, strategy):
        words = _words(order, strategy, seed, ["--backend", order.backend, *_goal(order)])
        return (Errand(f"{strategy}-{seed}", strategy, seed, words),)
    near = _words(order, strategy, seed, ["--lan", "--backend", "proxy", *_goal(order)])
    # The first step begins with everybody fetching the model: it is taken and left out.
    few = ["--backend", order.backend, "--target", "0", "--rounds", str(order.sync_steps + 1)]
    return (
        Errand(f"{strategy}-{seed}-lan", strategy, seed, near),
        Errand(f"{strategy}-{seed}-steps", strategy, seed, _words(order, strategy, seed, few)),
    )


def all_errands(order: ComparisonOrder) -> Iterator[Errand]:
    """Every run, all of a seed before the next: half a comparison compares something already."""
    for seed in range(1, order.seeds + 1):
        for strategy in order.strategies:
            yield from errands(order, strategy, seed)


def _goal(order: ComparisonOrder) -> list[str]:
    return [] if order.target is None else ["--target", str(order.target)]


def _words(
    order: ComparisonOrder, strategy: str, seed: int, more: Sequence[str]
) -> tuple[str, ...]:
    return (
        *(str(order.world), "--job", str(order.job), "--strategy", strategy, "--seed", str(seed)),
        *("--worker", order.worker, "--give-up-after", str(order.give_up_after_s)),
        *more,
    )
