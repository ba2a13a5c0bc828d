"""What a job's settings come to, in one line for whoever submits it."""

from hypergpu.jobfile.spec import PLANNED, JobSpec
from hypergpu.units import several


def submit_note(spec: JobSpec) -> str:
    """Return how a checked job counts its rounds, samples and escrow where plans decide on them,
    and whom its rounds wait for where the job's user has chosen that; empty: neither is so.
    """
    parts = [*_plan_parts(spec)] if spec.strategy == "aware" else []
    if spec.round.quorum >= 1:
        parts.append("with quorum = 1 each round waits for its slowest node")
    elif spec.round.deadline_ms and spec.strategy != "aware":
        limit = _duration(spec.round.deadline_ms)
        parts.append(f"each round may wait {limit} for slow nodes, as the deadline states")
    return f'strategy "{spec.strategy}": {"; ".join(parts)}' if parts else ""


def _plan_parts(spec: JobSpec) -> list[str]:
    training = spec.training
    product = f"{training.rounds} x {training.inner_steps} x {training.batch_size}"
    nodes = several(training.nodes, "node")
    parts = [
        f"{spec.stated_samples:,} samples ({product} x {nodes}) in as many rounds as plans make"
    ]
    if stated_settings := _stated_settings(spec):
        parts.append(f"as stated: {', '.join(stated_settings)}")
    if spec.pay.unit_price:
        most = spec.pay.most_for(spec.most_samples)
        parts.append(f"escrow {spec.escrow}")
        if spec.escrow < most:
            parts[-1] += f", and the work may cost {most}"
    return parts


def _stated_settings(spec: JobSpec) -> list[str]:
    settings = []
    for key in PLANNED:
        if spec.aware.takes_as_stated(key):
            table, _, name = key.partition(".")
            settings.append(f"{key} {getattr(getattr(spec, table), name)}")
    if spec.round.deadline_ms:
        settings.append(f"deadline {_duration(spec.round.deadline_ms)}")
    return settings


def _duration(time_ms: int) -> str:
    return f"{time_ms // 1000} s" if time_ms % 1000 == 0 else f"{time_ms} ms"
