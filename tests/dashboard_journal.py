"""A job's journal as a coordinator would write it, from a few choices."""

from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec

from dashboard_api.core.lanes import PHASES
from hypergpu.ids import Digest, JobKey, NodeId
from hypergpu.journal.measured_work import MeasuredWork
from hypergpu.statements import Contribution
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples
from hypergpu.user.client.values import (
    EstimateView,
    HealthHistoryView,
    HealthView,
    JobEvent,
    JobView,
    NodeLevelsView,
    NodeView,
    ParticipantView,
    ReadingView,
)

JOB = "job-0123456789ab"
START_MS = 1_790_000_000_000
SPEC: dict[str, Any] = {
    "workload": "digits-softmax",
    "name": "digits",
    "training": {"rounds": 8, "batch_size": 32, "nodes": 3},
    "round": {"quorum": 0.6},
    "pay": {"unit_price": 1_000_000, "escrow": 5_000_000},
}


def node_id(number: int) -> str:
    return f"0x{number:040x}"


def journal(seed: int, *, rounds: int = 4, nodes: int = 3) -> list[JobEvent]:
    """Every event of a job in which nodes come, go, fail and are rejected by chance."""
    rng = Random(seed)
    events = [JobEvent(0, 0, "JobCreated", {"job_id": JOB, "spec": SPEC, "round": None})]
    at_ms = 0

    def add(kind: str, **body: Any) -> None:
        nonlocal at_ms
        at_ms += rng.randrange(1, 900)
        events.append(JobEvent(len(events), at_ms, kind, {"kind": kind, "at_ms": at_ms, **body}))

    add("ModelInitialised", model={"blob": {"digest": "aa", "size_bytes": 2600}, "round": 0})
    for number in range(nodes):
        add("NodeJoined", node=node_id(number))
    for number in range(rounds):
        for kind, body in _round(rng, number, [node_id(each) for each in range(nodes)]):
            add(kind, **body)
    add("JobEnded", phase="finished", reason="all rounds are done")
    return events


def _round(rng: Random, number: int, nodes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    resting_reasons = {node: "it is too slow" for node in nodes if rng.random() < 0.1}
    working_nodes = [node for node in nodes if node not in resting_reasons]
    yield "RoundPlanned", {"plan": _plan(rng, number, working_nodes, resting_reasons)}
    accepted_nodes = []
    for node in working_nodes:
        chance = rng.random()
        if chance < 0.7:
            accepted_nodes.append(node)
            yield "UpdateReceived", {"node": node, "round": number, "update": _update(rng)}
        elif chance < 0.8:
            yield "UpdateRejected", {"node": node, "round": number, "reason": "not finite"}
        elif chance < 0.9:
            yield "NodeLost", {"node": node, "reason": "it was not heard of for 15 s"}
            yield "NodeJoined", {"node": node}
        else:
            yield "ShardHandedBack", {"node": node, "round": number, "reason": "out of memory"}
    model = {"blob": {"digest": f"{number:02x}", "size_bytes": 2600}, "round": number + 1}
    yield "AggregateReady", {"round": number, "model": model, "omitted": []}
    yield "RoundRecorded", _record(number, len(working_nodes), len(accepted_nodes))
    works = [measured_work(node, number, rng.randrange(10_001)) for node in accepted_nodes]
    yield "RoundMeasured", {"round": number, "updates": works}
    if number % 2:
        score = {"loss": 1.0 / number, "metric": 1 - 0.5 / number, "metric_name": "accuracy"}
        yield "EvaluationReady", {"round": number + 1, **score}


def measured_work(
    node: str, number: int, quality_bps: int, *, samples: int = 1280, compute_ms: int = 0
) -> dict[str, Any]:
    """An update of ``RoundMeasured``."""
    contribution = Contribution(
        job=JobKey("0" * 64),
        epoch=0,
        round=number,
        node=NodeId(node),
        shard=Digest("0" * 64),
        model=Digest("0" * 64),
        update=Digest("0" * 64),
        samples=Samples(samples),
        inner_steps=20,
        compute_ms=Milliseconds(compute_ms),
        update_bytes=Bytes(1300),
        lease=1,
        nonce=0,
    )
    work = MeasuredWork(contribution, b"", BasisPoints(quality_bps), "agreement", "agrees by 0.9")
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(work))
    return fields


def _plan(rng: Random, number: int, working: list[str], resting: dict[str, str]) -> dict[str, Any]:
    part = {"inner_steps": 20, "codec": "int4", "reason": "H=20"}
    forecast_ms = rng.choice((0, 900))
    nodes = {node: {**part, "forecast_ms": forecast_ms, "spread_ms": 100} for node in working}
    plan = {"round": number, "nodes": nodes, "resting": resting, "reason": "as before"}
    return {**plan, "deadline_ms": rng.choice((0, 5_000))}


def _update(rng: Random) -> dict[str, Any]:
    phases = {f"{phase}_ms": rng.randrange(0, 60) for phase in PHASES}
    return {
        "phases": rng.choice((None, phases)),
        "blob": {"digest": "bb", "size_bytes": 1300},
        "samples": 1280,
        "inner_steps": 20,
        "compute_ms": rng.randrange(0, 400),
        "loss_last": rng.random(),
        "codec": "int4",
        "nonce": START_MS + rng.randrange(10_000),
    }


def _record(number: int, participants: int, updates: int) -> dict[str, Any]:
    return {
        "round": number,
        "participants": participants,
        "updates": updates,
        "samples": 1280 * updates,
        "samples_per_s": 999.5,
        "bytes_up": 1300 * updates,
        "bytes_down": 2600,
        "duration_ms": 400,
        "loss": 2.0 / (number + 1),
        "forecast_error": 0.1,
        "reason": f"round {number} closed: every expected update is there",
    }


def summary(job_id: str = JOB, phase: str = "training", **values: Any) -> JobView:
    """A job's newest figures."""
    fields: dict[str, Any] = {
        "name": "digits",
        "reason": "round 0 is open",
        "round": 0,
        "rounds": 8,
        "nodes": 3,
        "loss": None,
        "metric": None,
        "metric_name": "accuracy",
        "bytes_up": 0,
        "bytes_down": 0,
        "updates_accepted": 0,
        "updates_rejected": 0,
        "samples": 0,
        "model": None,
        "at_ms": 0,
    } | values
    return JobView(id=job_id, phase=phase, **fields)


HEALTH = HealthView(0.83, "high", 0.75, 0.9, 0.85, 0.95, "speed 0.75 lowers it most", 0)


def levels(node: int = 1, *, state: str = "pending", **given: Any) -> NodeLevelsView:
    """Levels of a node that takes part in round 0; ``given`` changes them or the participant's."""
    work = {"slot": node, "steps_done": 0, "steps_total": 20, "loss": 0.5, "phase": ""}
    work |= {name: given.pop(name) for name in tuple(given) if name in work}
    participant = ParticipantView(node_id(node), state=state, reason="", name="", **work)  # type: ignore[arg-type]
    line = dict.fromkeys(("round_trip_us", "round_trip_spread_us", "loss", "step_us"))
    rates = dict.fromkeys(("up_bits_per_s", "down_bits_per_s"))
    values: dict[str, Any] = {"job": JOB, "health": HEALTH, "plan_reason": "", "round": 0}
    values |= {"state": "working", "reason": "", "participant": participant, **line, **rates}
    return NodeLevelsView(id=node_id(node), **(values | given))


def levels_seen(seed: int, nodes: int = 3) -> list[NodeLevelsView]:
    """Levels of nodes in some round."""
    rng = Random(seed)
    round_ = rng.randrange(6)
    return [
        levels(
            number,
            state=rng.choice(("pending", "received")),
            steps_done=rng.randrange(21),
            phase=rng.choice(("", "download", "upload")),
            round=round_,
            round_trip_us=rng.randrange(10**5),
        )
        for number in range(nodes)
    ]


def nodes_seen(seed: int, nodes: int = 3, state: str = "working") -> list[NodeView]:
    """Nodes with readings."""
    rng = Random(seed)
    rtt = EstimateView(rng.random() * 1e5, rng.random() * 1e3, 3, 10)
    reading = ReadingView(rtt, 900, None, rtt, None, rtt, "bbr")
    return [
        NodeView(
            id=node_id(number),
            state=state,
            reason="",
            device="cpu",
            device_name="CPU, 2 threads",
            memory_bytes=1 << 30,
            worker="numpy",
            workloads={},
            job=JOB,
            last_seen_ms_ago=rng.randrange(5_000),
            software="hypergpu 0.1.0",
            updates_accepted=rng.randrange(9),
            updates_rejected=0,
            reading=reading,
            health=HEALTH,
            health_history=HealthHistoryView(1, (0.8, 0.83)),
            plan_reason="H=20",
            name=f"machine-{number}",
        )
        for number in range(nodes)
    ]
