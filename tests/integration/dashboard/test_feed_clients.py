"""Clients of the feed: quick ones, slow ones, ones that never read, ones that come back."""

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from dashboard_api.core.changes import apply_changes
from dashboard_api.core.outbox import QUEUE_BYTES
from dashboard_api.shell.feed import Feed
from tests.dashboard_journal import JOB, START_MS, journal, summary
from tests.dashboard_server import DashboardUnderTest, dashboard

PIECE = "x" * 100_000


def shout(feed: Feed, number: int) -> None:
    """A change of a hundred kilobytes, past the pace."""
    feed.projection.take_jobs([summary(reason=f"{number} {PIECE}")])
    feed.publish()


def reason_in(state: dict[str, Any]) -> str:
    return str(state.get("jobs", {}).get(JOB, {}).get("reason", ""))


async def read_until(connection: Any, state: dict[str, Any], wanted: str) -> dict[str, Any]:
    """Follow the feed until the job's reason begins so; returns the state."""
    while not reason_in(state).startswith(wanted):
        frame = json.loads(await connection.recv())
        if frame["type"] == "snapshot":
            state = frame["state"]
        elif frame["type"] == "delta":
            apply_changes(state, frame["changes"])
    return state


async def test_hello_comes_first_then_the_state_then_deltas_in_order(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as under_test, under_test.open_feed() as connection:
        hello = json.loads(await connection.recv())
        assert (hello["type"], hello["proto"], hello["role"]) == ("hello", 1, "operator")
        snapshot = json.loads(await connection.recv())
        assert snapshot["type"] == "snapshot"
        under_test.feed.projection.take_jobs([summary()])
        under_test.feed.publish()
        delta = json.loads(await connection.recv())
        while JOB not in json.dumps(delta):
            assert delta["seq"] == snapshot["seq"] + 1
            snapshot, delta = delta, json.loads(await connection.recv())
        assert delta["seq"] == snapshot["seq"] + 1


async def test_a_client_that_comes_back_gets_what_it_missed_and_no_snapshot(
    tmp_path: Path,
) -> None:
    async with dashboard(tmp_path) as under_test:
        async with under_test.open_feed() as connection:
            hello = json.loads(await connection.recv())
            snapshot = json.loads(await connection.recv())
        for event in journal(7):
            under_test.feed.projection.take_event(JOB, event, START_MS + event.at_ms)
        under_test.feed.publish()
        query = f"?epoch={hello['epoch']}&seq={snapshot['seq']}"
        async with under_test.open_feed(query) as connection:
            assert json.loads(await connection.recv())["type"] == "hello"
            state = snapshot["state"]
            while "ended_at_ms" not in state["jobs"].get(JOB, {}):
                delta = json.loads(await connection.recv())
                assert delta["type"] == "delta"
                apply_changes(state, delta["changes"])
        assert state["jobs"] == under_test.feed.projection.state["jobs"]


async def test_a_client_of_another_history_gets_a_snapshot(tmp_path: Path) -> None:
    async with (
        dashboard(tmp_path) as under_test,
        under_test.open_feed("?epoch=another&seq=1") as connection,
    ):
        await connection.recv()
        assert json.loads(await connection.recv())["type"] == "snapshot"


async def test_a_client_that_reads_nothing_costs_a_bounded_queue_and_is_cut_off(
    tmp_path: Path,
) -> None:
    async with dashboard(tmp_path) as under_test, under_test.open_feed() as quick:
        under_test.services.stalled_after_ms = 400
        with closing(await _silent_client(under_test)):
            await _until(lambda: len(under_test.feed.clients) == 2, under_test.feed)
            state: dict[str, Any] = {}
            for number in range(60):
                shout(under_test.feed, number)
                for client in under_test.feed.clients:
                    assert client.queue.bytes_waiting <= QUEUE_BYTES
                # The quick client reads on, whatever the silent one does.
                state = await read_until(quick, state, f"{number} ")
            await _until(lambda: len(under_test.feed.clients) == 1, under_test.feed)


async def test_a_slow_client_gets_the_newest_state_in_place_of_what_it_missed(
    tmp_path: Path,
) -> None:
    async with dashboard(tmp_path) as under_test, under_test.open_feed(max_queue=1) as slow:
        await slow.recv()
        quick_state: dict[str, Any] = {}
        async with under_test.open_feed() as quick:
            for number in range(80):
                shout(under_test.feed, number)
                quick_state = await read_until(quick, quick_state, f"{number} ")
        async with asyncio.timeout(60):
            state = await read_until(slow, {}, "79 ")
        assert reason_in(state) == reason_in(quick_state)
        forced_counts = [each.queue.snapshots_forced for each in under_test.feed.clients]
        assert under_test.feed.snapshots_forced + sum(forced_counts) >= 1


async def _silent_client(under_test: DashboardUnderTest) -> socket.socket:
    """A connection that has shaken hands and reads nothing ever after."""
    host, port = "127.0.0.1", under_test.services.port
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (host, port))
    lines = [
        "GET /feed HTTP/1.1",
        f"Host: {host}:{port}",
        f"Authorization: {under_test.bearer['authorization']}",
        *("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"),
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ]
    await loop.sock_sendall(client, ("\r\n".join(lines) + "\r\n\r\n").encode())
    return client


async def _until(is_so: Callable[[], bool], feed: Feed) -> None:
    """Wait until something is so; it changes with the clients."""
    while not is_so():
        await feed.wait_for_clients()
