"""The demo of an attack: the same job twice, the second time with a node that lies."""

from collections.abc import Sequence

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

LIAR = {"HYPERGPU_NODE_WORKER_MODULE": "gpu_node.shell.worker.dishonest"}
POINTS_MOST = 1.0
"""Points of accuracy that a lying node may cost."""


def demonstrate_attack(demo: Demo, chosen: DemoPlan) -> str:
    """Train with honest nodes, then with the last one lying from the third round, and compare.

    Returns:
        The id of the second job.

    Raises:
        HyperGPUError: DEMO_MISSED, the liar cost more than a point of accuracy, or was paid for a
            lie.
    """
    coordinator, liar = demo.coordinator, demo.names[-1]
    demo.cluster.start_nodes({name: {} for name in demo.names})
    honest = _train_one(
        demo, replace(chosen.spec, name="honest", pay=Pay()), "all nodes are honest"
    )
    demo.cluster.replace_node(liar, LIAR)
    lies = "turns its updates round, ten times as long, from the third round"
    attacked_history = _train_one(demo, replace(chosen.spec, name="attacked"), f"{liar} {lies}")
    job_id = coordinator.find_job("attacked")
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
    _check(100 * (before - after), [work for work in works if work.node == node_id], liar)
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
    paid_works = [work for work in works if work.contribution.round >= 2 and work.quality_bps]
    if paid_works:
        first = paid_works[0]
        number = first.contribution.round + 1
        detail = f"{liar} was paid for a lie in round {number}: {first.reason}"
        raise HyperGPUError(Reason.DEMO_MISSED, detail)
