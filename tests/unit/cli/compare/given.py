"""Reports and orders for tests of comparisons."""

from pathlib import Path

from hypergpu.cli.compare.runs import ComparisonOrder
from hypergpu.client.history import EvaluationPoint, RoundPoint, target_reached_at
from hypergpu.units import Bytes, Milliseconds, Samples
from netsim.measure.lateness import LatenessVerdict
from netsim.run.report import RunReport

TARGET = 0.9
ORDER = ComparisonOrder(
    job=Path("job.toml"),
    world=Path("homes.toml"),
    strategies=("sync", "aware"),
    seeds=2,
    backend="proxy",
    target=TARGET,
    out=Path("out"),
    sync_steps=20,
    worker="auto",
    give_up_after_s=60.0,
)


def report(
    metrics: tuple[float, ...],
    *,
    strategy: str = "aware",
    seed: int = 1,
    round_ms: int = 1000,
    target: float = TARGET,
    is_valid: bool = True,
) -> RunReport:
    """A job whose every round takes as long, moves 10 bytes up and 30 down, and is evaluated."""
    rounds = tuple(
        RoundPoint(
            number=number,
            duration_ms=Milliseconds(round_ms),
            ended_ms=Milliseconds(round_ms * number),
            samples=Samples(100),
            bytes_up=Bytes(10),
            bytes_down=Bytes(30),
        )
        for number in range(1, len(metrics) + 1)
    )
    evaluations = tuple(
        EvaluationPoint(
            round=number,
            at_ms=Milliseconds(round_ms * number),
            loss=None,
            metric=metric,
            samples=Samples(100 * number),
            bytes_up=Bytes(10 * number),
            bytes_down=Bytes(30 * number),
        )
        for number, metric in enumerate(metrics, 1)
    )
    return RunReport(
        world="homes",
        strategy=strategy,
        seed=seed,
        backend="proxy",
        phase="finished",
        reason="all rounds are done",
        rounds=rounds,
        metric=metrics[-1],
        verdict=LatenessVerdict(
            is_valid=is_valid, sentence="VALID: on time" if is_valid else "INVALID: 9 ms late"
        ),
        metric_name="accuracy",
        target=target,
        evaluations=evaluations,
        to_target=target_reached_at(evaluations, target, "accuracy"),
    )
