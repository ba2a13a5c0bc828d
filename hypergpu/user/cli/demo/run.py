"""The demo from beginning to end: training, one node's death and return, and the summary."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from hypergpu.command_line import program
from hypergpu.errors import Reason
from hypergpu.jobfile.spec import JobSpec
from hypergpu.sites import Sites, told_sites
from hypergpu.user.cli.demo.attack import demonstrate_attack
from hypergpu.user.cli.demo.fixed import follow_fixed
from hypergpu.user.cli.demo.folder import (
    ACCOUNTS_NAME,
    BUCKETS_NAME,
    MODEL_NAME,
    PAGE_NAME,
    SUMMARY_NAME,
    demo_folder,
)
from hypergpu.user.cli.demo.following import Demo, NodeFault, NodeReturn, Undisturbed, follow
from hypergpu.user.cli.demo.job import S3, DemoPlan, StrategyTime, race_strategies, sync_ratio
from hypergpu.user.cli.demo.settlement import (
    DemoPay,
    settle_demo,
    start_with_chain,
)
from hypergpu.user.client import HyperGPUError, JobView, Reached
from hypergpu.user.client.history import History, target_reached_at
from hypergpu.user.cluster.cluster import LocalCluster, ReadyLine
from hypergpu.user.cluster.dashboard import DashboardProcess
from hypergpu.user.cluster.folder import run_folder
from hypergpu.user.cluster.s3_server import BUCKET, S3Server
from hypergpu.user.terminal.commands import usage_error
from hypergpu.user.terminal.output import amount_text, is_rich, say, size, span


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's figures."""

    accuracy: float
    target: float
    to_target: Reached | None
    rounds: int
    wall_s: float
    bytes_up: int
    bytes_down: int
    nodes: int
    updates_accepted: int
    updates_rejected: int
    model_bytes: int
    model_digest: str
    strategy: str
    sync_ratio: float | None
    """How many times as long every-step training would take to the target; None: not known."""
    runners: tuple[StrategyTime, ...]
    back: NodeReturn
    """The killed node's return."""
    receipts: int
    """All of them sound, both signatures of each."""
    earned: int
    """Pay of all nodes, in the token's smallest unit."""
    paid: int | None
    """Pay that the chain moved into their wallets; None where there is no chain."""
    transactions: int
    """Transactions that record contributions on the chain."""
    epochs: int
    """Epochs with a payment; 0 without a chain."""
    decimals: int
    """Decimals of the token; 0 without a chain."""


def say_end(summary: Summary, folder: Path) -> None:
    """Write the file and print the end of the demo."""
    text = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    (folder / SUMMARY_NAME).write_bytes(text + b"\n")
    names = (PAGE_NAME, SUMMARY_NAME, ACCOUNTS_NAME, MODEL_NAME)
    files = ", ".join(str(folder / name) for name in names if (folder / name).exists())
    say()
    for name, words in (*_end_rows(summary), ("files", files)):
        say(f"{name:<10} {words}")


def _end_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "accuracy", f"{summary.accuracy:.2%} on held-out digits, wanted {summary.target:.0%}"
    to_target = ""
    if summary.to_target:
        to_target = f"{span(summary.to_target.at_ms / 1000)} to {summary.target:.0%}, "
    yield "time", f"{to_target}{span(summary.wall_s)} in all with the comparison below"
    yield "money", _money(summary)
    for runner in summary.runners[1:]:
        yield f"  {runner.strategy}", _rival_time(runner, summary.runners[0])
    moved_bytes = summary.bytes_up + summary.bytes_down
    # One whole float32 model each way, each round, each node, is the plain way of doing this.
    plain = 2 * summary.model_bytes * summary.rounds * summary.nodes
    saving_text = (
        f", {plain / moved_bytes:.1f}x less than whole float32 models each way in each round"
        if moved_bytes and plain
        else ""
    )
    yield "traffic", f"{size(summary.bytes_up)} up, {size(summary.bytes_down)} down{saving_text}"
    yield (
        "work",
        (
            f"{summary.rounds} rounds of {summary.strategy} on {summary.nodes} nodes,"
            f" {summary.updates_accepted} updates accepted, {summary.updates_rejected} rejected"
        ),
    )
    back = summary.back
    yield (
        "fault",
        (
            f"{back.victim} was killed on the way; {span(back.after_s)} later its work was accepted"
            f" again, in round {back.round}"
        ),
    )


def _money(summary: Summary) -> str:
    earned_text = amount_text(summary.earned, summary.decimals)
    receipts = f"{summary.receipts} receipts, all sound; {earned_text} earned"
    if summary.paid is None:
        return f"{receipts}, no chain to pay it"
    paid_text = amount_text(summary.paid, summary.decimals)
    return f"{receipts} and {paid_text} paid, recorded by {summary.transactions} transactions"


def _rival_time(runner: StrategyTime, first: StrategyTime) -> str:
    if runner.at_ms is None:
        return runner.how
    times = f", {runner.at_ms / first.at_ms:.3g}x as long" if first.at_ms else ""
    return f"{span(runner.at_ms / 1000)} to the target{times} ({runner.how})"


VICTIM = 1
"""Place in the list of the node that is killed."""
PROFILES = ("home-fibre", "home-cable", "home-dsl", "lte-moving", "starlink")
_PAGE_WITHIN_S = 60.0


def run_over_lines(net: str, nodes: int, arguments: Sequence[str]) -> None:
    """Become `netsim shape`, which runs the demo with these arguments over one line a node.

    Args:
        net: A backend of netsim.
        nodes: With more than there are profiles, each comes again.
        arguments: Arguments of `hypergpu demo`.
    """
    profiles = [PROFILES[number % len(PROFILES)] for number in range(nodes)]
    demo = program("hypergpu.user.cli", "demo", *arguments)
    shape = program("netsim", "shape", "--backend", net, *profiles, "--", *demo)
    sys.stdout.flush()
    os.execv(shape[0], shape)  # noqa: S606 - our own program


def demonstrate(folder: Path, chosen: DemoPlan) -> None:
    """Train, kill, restart, compare, pay, and say how it went.

    Args:
        folder: Gets the summary, the logs and the model.
        chosen: What is trained.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, there is no chain for the metering;
            DEMO_MISSED, the accuracy was missed or the job did not finish; FILE_UNUSABLE, the
            folder has files of these names that no demo left.
    """
    started_at_s, sites = time.monotonic(), told_sites()
    nodes = chosen.spec.training.nodes
    names = list(sites.nodes) if sites else [f"node-{number}" for number in range(1, nodes + 1)]
    if nodes <= VICTIM:
        raise usage_error(f"{nodes} link is open", "open two or more: the demo kills a node")
    with (
        run_folder(demo_folder(folder)),
        LocalCluster(folder, chosen.worker, sites) as cluster,
        ExitStack() as beside,
    ):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if chosen.note:
            say(chosen.note)
        say(f"starting a coordinator and {nodes} nodes as separate processes; logs: {folder}/logs")
        if chosen.blobs == S3:
            _use_object_store(cluster, sites, beside.enter_context(S3Server(folder / BUCKETS_NAME)))
        chosen = _start_coordinator(cluster, sites, chosen)
        _open_page(cluster.ready, beside)
        with cluster.operator() as coordinator:
            demo = Demo(cluster, coordinator, names)
            if chosen.is_attacked or chosen.is_fixed:
                (_train_attacked if chosen.is_attacked else _train_fixed)(demo, chosen, folder)
                return
            progress = _train(demo, chosen, folder, started_at_s)
            times = race_strategies(
                chosen, progress.history, lambda spec, title: _train_rival(demo, spec, title)
            )
            say()
            pay = settle_demo(cluster.ready, coordinator, progress.job.id, folder / ACCOUNTS_NAME)
            _export_page(cluster.ready, progress.job.id, folder / PAGE_NAME)
    summary = _summary(chosen, progress, times, pay, time.monotonic() - started_at_s)
    say_end(summary, folder)
    if summary.accuracy < chosen.target:
        detail = f"accuracy {summary.accuracy:.4f} is below {chosen.target}"
        raise HyperGPUError(Reason.DEMO_MISSED, detail)


def _use_object_store(cluster: LocalCluster, sites: Sites | None, server: S3Server) -> None:
    if sites is not None and sites.backend != "proxy":
        raise usage_error("nodes behind such links reach no object store", "--net proxy, or none")
    cluster.use_object_store(f"s3://{BUCKET}/demo", server.environment)
    say(f"bulk bytes go through an object store: rclone's S3 server at {server.url}")


def _open_page(ready: ReadyLine, beside: ExitStack) -> None:
    """Serve the page until the demo ends, and print its link."""
    dashboard = DashboardProcess(ready, Path(ready.operator_token_file).parent, None)
    beside.callback(dashboard.end)
    page_line = dashboard.wait_for_line(_PAGE_WITHIN_S)
    opens = "watch it in a browser (the link works once)"
    say(f"{opens}: {page_line.link}" if page_line.link else f"no page: {page_line.detail}")


def _export_page(ready: ReadyLine, job_id: str, out: Path) -> None:
    """Leave the job's course as one file that opens from disk."""
    command = program(
        "dashboard_api",
        *("--export-job", job_id, "--out", str(out)),
        *("--coordinator", ready.address, "--token-file", ready.operator_token_file),
    )
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    if process.returncode:
        say(f"the page was not written: {process.stderr.strip()}")


def _start_coordinator(cluster: LocalCluster, sites: Sites | None, chosen: DemoPlan) -> DemoPlan:
    """Start the coordinator; the plan pays nothing where this machine has no chain."""
    if sites is not None:
        say(f"each node has a line of its own ({sites.backend}): {', '.join(sites.nodes)}")
    if not chosen.spec.pay.unit_price:
        cluster.start_coordinator()
        return chosen
    lack = start_with_chain(cluster, sites, chosen.metering)
    if not lack:
        say("a local chain of play money settles what the work earns: Anvil")
        return chosen
    say(f"{lack}: nothing is paid")
    return chosen._replace(spec=replace(chosen.spec, pay=replace(chosen.spec.pay, unit_price=0)))


class DemoTraining(NamedTuple):
    """The demo's own job, trained."""

    job: JobView
    model_bytes: int
    history: History
    back: NodeReturn


def _train(demo: Demo, chosen: DemoPlan, folder: Path, started_at_s: float) -> DemoTraining:
    """Train the demo's own job, with a node killed on the way."""
    job_id = demo.coordinator.submit(chosen.spec)
    demo.cluster.start_nodes({name: {} for name in demo.names})
    say(f"a token let them join over TLS ({span(time.monotonic() - started_at_s)})")
    victim, spec = demo.names[VICTIM], chosen.spec
    fault = NodeFault(demo.cluster, demo.coordinator, job_id=job_id, victim=victim)
    title = f"{len(demo.names)} nodes train {spec.workload} ({spec.strategy}); {victim} is killed"
    progress = follow(demo, job_id, f"{title} on the way", fault)
    if fault.back is None:
        raise HyperGPUError(Reason.DEMO_MISSED, f"no update of {victim} was accepted afterwards")
    demo.coordinator.export(job_id, folder / MODEL_NAME, may_overwrite=True)
    detail = demo.coordinator.job(job_id)
    return DemoTraining(detail.job, detail.model_bytes, progress.history, fault.back)


def _train_rival(demo: Demo, spec: JobSpec, title: str) -> History:
    """Train a further job on the same nodes over the same lines, without anybody's death."""
    job_id = demo.coordinator.submit(spec)
    say()
    if not is_rich():
        say(title)
    return follow(demo, job_id, title).history


def _train_attacked(demo: Demo, chosen: DemoPlan, folder: Path) -> None:
    job_id = demonstrate_attack(demo, chosen)
    _export_page(demo.cluster.ready, job_id, folder / PAGE_NAME)


def _train_fixed(demo: Demo, chosen: DemoPlan, folder: Path) -> None:
    """Train a job in which nothing depends on time, and say the digest of its model last."""
    job_id = demo.coordinator.submit(chosen.spec)
    demo.cluster.start_nodes({name: {} for name in demo.names})
    title = f"{len(demo.names)} nodes train {chosen.spec.workload}, fixed"
    nobody = Undisturbed(demo.cluster)
    say(f"model {follow_fixed(demo.coordinator, job_id, title, nobody, folder / MODEL_NAME)}")


def _summary(
    chosen: DemoPlan,
    trained: DemoTraining,
    times: tuple[StrategyTime, ...],
    pay: DemoPay,
    wall_s: float,
) -> Summary:
    job, history = trained.job, trained.history
    return Summary(
        accuracy=job.metric if job.metric is not None else 0.0,
        target=chosen.target,
        to_target=target_reached_at(history.evaluations, chosen.target, history.metric_name),
        rounds=job.round,
        wall_s=round(wall_s, 1),
        bytes_up=job.bytes_up,
        bytes_down=job.bytes_down,
        nodes=chosen.spec.training.nodes,
        updates_accepted=job.updates_accepted,
        updates_rejected=job.updates_rejected,
        model_bytes=trained.model_bytes,
        model_digest=job.model or "",
        strategy=chosen.spec.strategy,
        sync_ratio=sync_ratio(times),
        runners=times,
        back=trained.back,
        receipts=pay.receipts,
        earned=pay.earned,
        paid=pay.paid,
        transactions=pay.transactions,
        epochs=pay.epochs,
        decimals=pay.decimals,
    )
