"""The demo of an attack: the same job twice, the second time with a node that lies."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from hypergpu.errors import Reason
from hypergpu.jobfile.spec import JobSpec, Pay
from hypergpu.journal.events import RoundMeasuredEvent
from hypergpu.journal.measured_work import MeasuredWork
from hypergpu.user.cli.demo.following import Demo, follow
from hypergpu.user.cli.demo.job import DemoPlan
from hypergpu.user.client import HyperGPUError, JobLedger
from hypergpu.user.client.history import History
from hypergpu.user.terminal.output import Column, Table, percent, say, say_table

POINTS_MOST = 1.0
"""Points of accuracy that a lying node may cost."""


class Lie(NamedTuple):
    """What a lying node sends."""

    job: str
    """Name of the job in which it does."""
    worker: str
    """Module of its worker."""
    first_round: int
    """Counts from 0."""
    description: str


LIES = (
    Lie(
        "attacked",
        "gpu_node.shell.worker.dishonest",
        2,
        "turns its updates round, ten times as long, from the third round",
    ),
    Lie(
        "attacked-layer",
        "gpu_node.shell.worker.dishonest_layer",
        0,
        "turns the sign of the first layer of its updates",
    ),
)


def demonstrate_attack(demo: Demo, chosen: DemoPlan) -> str:
    """Train with honest nodes, then with the last one telling each lie, and compare.

    Returns:
        The id of the last job.

    Raises:
        HyperGPUError: DEMO_MISSED, the liar cost more than a point of accuracy, or was paid for a
            lie.
    """
    demo.cluster.start_nodes({name: {} for name in demo.names})
    honest = _train_one(
        demo, replace(chosen.spec, name="honest", pay=Pay()), "all nodes are honest"
    )
    job_id = ""
    for lie in LIES:
        job_id = _demonstrate_lie(demo, chosen, lie, honest)
    return job_id


def _demonstrate_lie(demo: Demo, chosen: DemoPlan, lie: Lie, honest: History) -> str:
    coordinator, liar = demo.coordinator, demo.names[-1]
    demo.cluster.replace_node(liar, {"HYPERGPU_NODE_WORKER_MODULE": lie.worker})
    title = f"{liar} {lie.description}"
    attacked_history = _train_one(demo, replace(chosen.spec, name=lie.job), title)
    job_id = coordinator.find_job(lie.job)
    works = [
        work
        for event in coordinator.read_events(job_id)
        if isinstance(event.content, RoundMeasuredEvent)
        for work in event.content.updates
    ]
    node_id = coordinator.find_node(liar).id
    ids = {coordinator.find_node(name).id: name for name in demo.names}
    say()
    say_table(*_nodes_table(works, ids, coordinator.ledger(job_id)), empty="")
    before, after = (
        history.evaluations[-1].metric or 0.0 for history in (honest, attacked_history)
    )
    say()
    say(f"accuracy   {before:.2%} with honest nodes, {after:.2%} with {liar} lying")
    lies = [
        work
        for work in works
        if work.node == node_id and work.contribution.round >= lie.first_round
    ]
    _check(100 * (before - after), lies, liar)
    return job_id


def _train_one(demo: Demo, spec: JobSpec, title: str) -> History:
    job_id = demo.coordinator.submit(spec)
    say()
    say(title)
    return follow(demo, job_id, title).history


def _nodes_table(works: Sequence[MeasuredWork], names: dict[str, str], ledger: JobLedger) -> Table:
    worth = {each.node_id: each.worth for each in ledger.nodes}
    columns = (
        Column("node"),
        Column("quality", is_number=True),
        Column("unpaid rounds", is_number=True),
        Column("worth", is_number=True),
        Column("why", folds=True),
    )
    rows = []
    for node, name in sorted(names.items(), key=lambda each: each[1]):
        own = [work for work in works if work.node == node]
        unpaid_works = [each for each in own if not each.quality_bps]
        mean = sum(each.quality_bps for each in own) / max(1, len(own)) / 10_000
        first = unpaid_works[0] if unpaid_works else None
        why = f"round {first.contribution.round + 1}: {first.reason}" if first else ""
        rows.append((name, percent(mean), str(len(unpaid_works)), worth.get(node, "0"), why))
    return columns, rows


def _check(points_lost: float, works: Sequence[MeasuredWork], liar: str) -> None:
    if points_lost > POINTS_MOST:
        detail = f"{liar} cost {points_lost:.1f} points of accuracy, more than {POINTS_MOST:g}"
        raise HyperGPUError(Reason.DEMO_MISSED, detail)
    paid_works = [work for work in works if work.quality_bps]
    if paid_works:
        first = paid_works[0]
        number = first.contribution.round + 1
        detail = f"{liar} was paid for a lie in round {number}: {first.reason}"
        raise HyperGPUError(Reason.DEMO_MISSED, detail)
