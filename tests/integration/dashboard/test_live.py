"""The page's server beside a real coordinator with real nodes, both of which may be restarted."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import websockets

from dashboard_api.core.changes import apply_changes
from dashboard_api.core.state import FeedState
from hypergpu.jobfile.reading import parse_job
from hypergpu.user.cluster.cluster import ReadyLine
from hypergpu.user.cluster.dashboard import DashboardProcess
from tests.processes import ROOT, Cluster, NodeProcess

JOB = """
workload = "digits-softmax"
name = "seen"
strategy = "aware"
[training]
rounds = {rounds}
nodes = 2
[evaluation]
every = 2
"""
State = dict[str, Any]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("live")) as cluster:
        cluster.add_nodes(2)
        yield cluster


@contextlib.contextmanager
def page_beside(cluster: Cluster, port: int = 0) -> Any:
    """The page's server of a cluster; gives its address."""
    data_dir = cluster.coordinator.data_dir
    token_file = str(data_dir / "operator.token")
    page = DashboardProcess(ReadyLine(cluster.coordinator.address, token_file), data_dir, port)
    try:
        page_line = page.wait_for_line(60)
        assert page_line.link, page_line
        yield page_line.link.partition("/#")[0]
    finally:
        page.end()


def bearer(cluster: Cluster) -> dict[str, str]:
    token = (cluster.coordinator.data_dir / "operator.token").read_text("utf-8").strip()
    return {"authorization": f"Bearer {token}"}


def feed_of(cluster: Cluster, origin: str) -> Any:
    return feed_at(origin, bearer(cluster))


@contextlib.asynccontextmanager
async def feed_at(origin: str, headers: dict[str, str]) -> AsyncIterator[Any]:
    address = f"{origin.replace('http', 'ws', 1)}/feed"
    options: Any = {"additional_headers": headers, "max_size": None, "proxy": None}
    async with websockets.connect(address, **options) as connection:
        yield connection


async def follow(connection: Any, state: State, is_enough: Callable[[State], bool]) -> State:
    """Follow the feed until something is so."""
    while not (state and is_enough(state)):
        frame = json.loads(await connection.recv())
        state = frame.get("state", state)
        apply_changes(state, frame.get("changes", ()))
    return state


def rounds_of(state: State, job_id: str) -> dict[str, Any]:
    job = state["jobs"].get(job_id) or {}
    return {key: each for key, each in job.get("rounds_by_number", {}).items() if each["samples"]}


def has_ended(job_id: str) -> Callable[[State], bool]:
    def is_so(state: State) -> bool:
        job = state["jobs"].get(job_id)
        # Both the journal's end and the summary with the totals have been told.
        return bool(job and job["ended_at_ms"] and job["updates_accepted"])

    return is_so


async def test_a_job_is_seen_from_its_first_round_to_its_model(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster, page_beside(cluster) as origin:
        token = cluster.coordinator.node_token()
        owned_node = NodeProcess(tmp_path, "owned", "numpy")
        owned_node.join(token)
        cluster.nodes.append(owned_node)
        cluster.add_nodes(1)
        async with feed_of(cluster, origin) as connection:
            job_id = await asyncio.to_thread(cluster.submit, parse_job(JOB.format(rounds=6)))
            state = await follow(connection, {}, has_ended(job_id))
        job = msgspec.convert(state, FeedState, strict=True).jobs[job_id]
        assert job.phase == "finished"
        assert job.metric is not None
        assert [each.image[:10] for each in job.examples] == ["data:image"] * 8
        # Planned rounds differ in size, so their number is the plan's to choose.
        assert job.samples_of_output[-1].round == len(job.rounds_by_number)
        assert len(job.samples_of_output[-1].outputs) == 8
        first = job.rounds_by_number["0"]
        assert len(first.lanes) == 2
        for lane in first.lanes.values():
            assert lane.result == "accepted"
            ends = [segment.end_ms for segment in lane.segments]
            assert ends == sorted(end for end in ends if end is not None)
            assert not lane.is_estimate
            assert {"train", "upload", "wait"} <= {segment.phase for segment in lane.segments}
        async with httpx.AsyncClient(
            base_url=f"{origin}/api/v1", headers=bearer(cluster), trust_env=False
        ) as client:
            await _test_history(client, job_id)
        await _test_owner(origin, {"authorization": f"Bearer {token}"}, job_id)


async def _test_owner(origin: str, headers: dict[str, str], job_id: str) -> None:
    """The owner of one of the two nodes sees it and its part of the job, and may pause it."""
    async with (
        httpx.AsyncClient(base_url=f"{origin}/api/v1", headers=headers, trust_env=False) as client,
        feed_at(origin, headers) as connection,
    ):
        state = await follow(connection, {}, has_ended(job_id))
        state = await follow(connection, state, lambda state: bool(state["nodes"]))
        (own,) = state["nodes"]
        job = state["jobs"][job_id]
        assert {node for each in job["rounds_by_number"].values() for node in each["lanes"]} == {
            own
        }
        assert {event["node"] for event in job["events"]} <= {own, None}
        rounds = (await client.get(f"/jobs/{job_id}/rounds")).json()["rounds"]
        assert [list(each["lanes"]) for each in rounds] == [[own]] * len(rounds)
        events = (await client.get(f"/jobs/{job_id}/events?query=joined")).json()["events"]
        assert [event["node"] for event in events] == [own]
        assert (await client.post(f"/nodes/{own}/pause")).status_code == 200
        state = await follow(connection, state, lambda s: s["nodes"][own]["state"] == "paused")
        assert state["nodes"][own]["pause_reason"] == "paused by its owner"
        assert (await client.post("/nodes/0x00/pause")).status_code == 403
        assert (await client.post(f"/jobs/{job_id}/stop")).status_code == 403


async def _test_history(client: httpx.AsyncClient, job_id: str) -> None:
    series: Any = {"x": []}
    while len(series["x"]) < 6:  # The history is written twice a second.
        series = (await client.get(f"/jobs/{job_id}/series?names=loss,metric&x=round")).json()
    assert len(series["series"]["loss"]["mean"]) == len(series["x"])
    rounds = (await client.get(f"/jobs/{job_id}/rounds?from=0&to=1")).json()["rounds"]
    assert [each["number"] for each in rounds] == [0, 1]
    events = (await client.get(f"/jobs/{job_id}/events?query=joined")).json()["events"]
    assert len(events) == 2
    preview = {"set": {"lr": 0.5}, "preview": True}
    changes = await client.post(f"/jobs/{job_id}/parameters", json=preview)
    assert changes.json()["changes"] == [
        {"key": "inner.learning_rate", "before": 0.001, "after": 0.5}
    ]
    export_response = await client.get(f"/jobs/{job_id}/export")
    assert export_response.status_code == 200
    assert len(export_response.content) > 1000
    pause_response = await client.post(f"/jobs/{job_id}/pause")
    assert pause_response.status_code == 409
    assert pause_response.json()["fix"]


def has_round_trips(state: State) -> bool:
    nodes = state["nodes"].values()
    return len(nodes) == 2 and all(node["rtt_us"] for node in nodes)


def is_training(job_id: str) -> Callable[[State], bool]:
    def is_so(state: State) -> bool:
        levels = state["jobs"].get(job_id, {}).get("levels", {}).values()
        return len(levels) == 2 and all(
            level["phase"] == "train" and level["steps_done"] for level in levels
        )

    return is_so


async def test_the_feed_goes_on_when_the_coordinator_is_killed_and_comes_back(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path) as cluster, page_beside(cluster) as origin:
        cluster.add_nodes(2, settings={"HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": "60"})
        # Rounds of more than a second, which no plan opens.
        job = JOB.replace("aware", "diloco").format(rounds="10\ninner_steps = 25")
        async with feed_of(cluster, origin) as connection:
            state = await follow(connection, {}, has_round_trips)
            job_id = await asyncio.to_thread(cluster.submit, parse_job(job))
            state = await follow(connection, state, is_training(job_id))
            state = await follow(
                connection, state, lambda state: len(rounds_of(state, job_id)) >= 2
            )
            cluster.coordinator.kill()
            state = await follow(
                connection, state, lambda state: not state["coordinator"]["is_reachable"]
            )
            assert state["coordinator"]["reason"]
            assert rounds_of(state, job_id)
            await asyncio.to_thread(cluster.coordinator.start)
            state["jobs"][job_id]["levels"] = {}
            state = await follow(connection, state, is_training(job_id))
            state = await follow(connection, state, has_ended(job_id))
            state = await follow(
                connection, state, lambda state: state["coordinator"]["is_reachable"]
            )
        sequences = [event["sequence"] for event in state["jobs"][job_id]["events"]]
        assert sequences == sorted(set(sequences))


async def test_a_page_that_is_restarted_tells_the_same_state_and_keeps_its_history(
    cluster: Cluster,
) -> None:
    with page_beside(cluster) as origin:
        async with feed_of(cluster, origin) as connection:
            job_id = await asyncio.to_thread(cluster.submit, parse_job(JOB.format(rounds=4)))
            before = await follow(connection, {}, has_ended(job_id))
    with page_beside(cluster) as origin:
        async with feed_of(cluster, origin) as connection:
            after = await follow(connection, {}, has_ended(job_id))
    rounds = [state["jobs"][job_id]["rounds_by_number"] for state in (before, after)]
    assert rounds[0].keys() == rounds[1].keys()
    assert rounds[0]["0"]["samples"] == rounds[1]["0"]["samples"]
    assert abs(rounds[0]["0"]["started_at_ms"] - rounds[1]["0"]["started_at_ms"]) < 10_000


def test_a_job_is_written_as_one_page_and_shown_again_without_a_coordinator(
    cluster: Cluster, tmp_path: Path
) -> None:
    out, recording = tmp_path / "job.html", tmp_path / "job.json"
    job_id = cluster.submit(parse_job(JOB.format(rounds=4)))
    cluster.wait_until_finished(job_id)
    for target in (out, recording):
        words = ["job", "export-page", job_id, str(target)]
        flags = ["--token-file", str(cluster.coordinator.data_dir / "operator.token")]
        command = [sys.executable, "-m", "hypergpu.user.cli", *words, *flags]
        subprocess.run(command, check=True, cwd=ROOT)
    page = out.read_text("utf-8")
    assert '<script type="application/json" id="recording">' in page
    assert len(page) <= 1 << 20
    flags = ["--recording", str(recording), "--port", "0", "--data-dir", str(tmp_path / "shown")]
    with running([sys.executable, "-m", "dashboard_api", *flags]) as page_lines:
        origin = json.loads(next(page_lines))["link"].rstrip("/")
        asyncio.run(_test_recording(origin, job_id))


async def _test_recording(origin: str, job_id: str) -> None:
    headers: Any = {"additional_headers": {"Origin": origin}, "max_size": None, "proxy": None}
    async with websockets.connect(f"{origin.replace('http', 'ws', 1)}/feed", **headers) as feed:
        hello = json.loads(await feed.recv())
        assert hello["recorded"] is True
        state = await follow(feed, {}, has_ended(job_id))
    assert state["jobs"][job_id]["phase"] == "finished"


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[Iterator[str]]:
    """A program while the block runs; gives the lines that it prints."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None
    try:
        yield iter(child.stdout)
    finally:
        child.terminate()
        child.wait(60)
        child.stdout.close()


def test_the_example_follows_the_feed(cluster: Cluster) -> None:
    with page_beside(cluster) as origin:
        address = f"{origin.replace('http', 'ws', 1)}/feed"
        token_file = str(cluster.coordinator.data_dir / "operator.token")
        example = str(ROOT / "examples" / "feed_client.py")
        with running([sys.executable, example, address, token_file]) as lines:
            job_id = cluster.submit(parse_job(JOB.format(rounds=3)))
            assert any(line.startswith(f"{job_id} finished ") for line in lines)
