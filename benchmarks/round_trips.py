"""Round trips of a small round, counted on the wire between a real node and its coordinator.

Down: between an assignment and the first inner step; up: between the last inner step and the
answer that the update is accepted. A change of direction, from a request to its answer, counts once
over all connections. The control stream's own messages do not count, nor do datagrams of probes.
"""

import statistics
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.ours.cluster import LOOPBACK, BenchmarkError, running
from benchmarks.ours.table import BenchmarkParts, PartFigures
from benchmarks.ours.warm import changed_environment
from benchmarks.ours.wire_trace import CountedTrips, DelayingProxy, round_trips, wire_events
from hypergpu.jobfile.spec import CodecChoice, Evaluation, JobSpec, TrainingSettings
from hypergpu.user.client import Coordinator
from hypergpu.wire.credentials import split_address, with_addresses

SIZES = {"20_kb": 40_000, "200_kb": 400_000}
"""Parameters whose int4 updates and deltas have about so many bytes."""
DELAY_S = 0.05
"""Each way."""
STEPS, FLOOR_MS = 4, 100
WARM_UP_ROUNDS = 3
_PROXY = "127.0.0.2"
_WANTED_UP, _WANTED_DOWN = 1, 0


def traced_rounds(parameters: int, rounds: int) -> list[CountedTrips]:
    """Run a job of one node through the proxy; the first rounds are left out.

    Raises:
        BenchmarkError: The job did not finish, or too few rounds were seen.
    """
    floor = {"HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": str(FLOOR_MS)}
    with (
        tempfile.TemporaryDirectory(prefix="hypergpu-trips-") as name,
        running(Path(name), is_plaintext=True) as cluster,
    ):
        port = split_address(cluster.ready.address)[1]
        proxy = DelayingProxy(_PROXY, LOOPBACK, DELAY_S)
        ports = {port, cluster.ready.node_port, cluster.ready.bulk_port} - {0}
        with proxy.serve(sorted(ports)):
            token = with_addresses(cluster.node_token(), (f"{_PROXY}:{port}",))
            with changed_environment(floor):
                cluster.add_nodes(1, "null", token=token)
            with cluster.client() as client:
                _train(client, parameters, rounds + WARM_UP_ROUNDS + 1)
            events = wire_events(proxy.records(), cluster.ready.bulk_port)
    trips = round_trips(events)[WARM_UP_ROUNDS:]
    if len(trips) < rounds:
        raise BenchmarkError(f"{len(trips)} rounds were seen on the wire, {rounds} were run")
    return trips


def _train(client: Coordinator, parameters: int, rounds: int) -> None:
    spec = JobSpec(
        workload="null",
        options={"parameters": parameters},
        training=TrainingSettings(rounds=rounds, inner_steps=STEPS, nodes=1),
        codec=CodecChoice(up="int4", down="int4"),
        evaluation=Evaluation(every=rounds),
    )
    job_id = client.submit(spec)
    for _ in client.watch(job_id):
        pass
    summary = client.job(job_id).job
    if summary.phase != "finished":
        raise BenchmarkError(f"the job is {summary.phase}: {summary.reason}")


def trip_figures(*, rounds: int) -> PartFigures:
    """The medians of each size; the figures are the larger size's.

    Raises:
        BenchmarkError: A job did not finish.
    """
    rows: list[tuple[str, ...]] = []
    metrics: dict[str, float] = {}
    for name, parameters in SIZES.items():
        trips = traced_rounds(parameters, rounds)
        up, down = (
            float(statistics.median(values))
            for values in ([trip.up for trip in trips], [trip.down for trip in trips])
        )
        metrics |= {f"round_trips_up_{name}": up, f"round_trips_down_{name}": down}
        most = max(trip.up for trip in trips), max(trip.down for trip in trips)
        what = f"update and delta of {name.replace('_kb', '')} kB"
        rows += [
            (f"{what}: up", f"{up:g}, {most[0]} at most", f"{_WANTED_UP}"),
            (f"{what}: down", f"{down:g}, {most[1]} at most", f"{_WANTED_DOWN}"),
        ]
    for way in ("up", "down"):
        metrics[f"round_trips_{way}"] = max(metrics[f"round_trips_{way}_{name}"] for name in SIZES)
    return PartFigures(rows=rows, metrics=metrics)


def parts(is_quick: bool) -> BenchmarkParts:
    """One part."""
    rounds = 4 if is_quick else 20
    return BenchmarkParts(
        title="Round trips of a round",
        columns=("", "round trips, median", "wanted"),
        parts={"trips": partial(trip_figures, rounds=rounds)},
        notes=lambda: [
            f"{rounds} rounds a size, one node, {2000 * DELAY_S:g} ms there and back, plaintext.",
            "Counted: changes from request to answer over all TCP connections, but for the control",
            "stream's messages (heartbeats, probes, progress) and HTTP/2's own frames.",
        ],
    )
