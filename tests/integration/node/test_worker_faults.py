"""Faults of a real worker under a real daemon, which lives, is heard throughout, and restarts it at
most three times, each time later.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hypergpu.wire.credentials import token_text
from tests import unruly_workload
from tests.integration.node.fake_coordinator import WELCOME, DaemonKit, serve
from tests.integration.node.test_node_command import node, wait_for_end

HEARTBEAT_MS = 300


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[DaemonKit]:
    async with serve(tmp_path / "authority") as there:
        welcome = type(WELCOME)()
        welcome.CopyFrom(WELCOME)
        welcome.heartbeat_interval_ms = HEARTBEAT_MS
        there.service.welcome = welcome
        yield DaemonKit(there, tmp_path)


@pytest.mark.parametrize(
    ("deed", "reason", "starts"),
    [
        ("crash", "the worker died 4 times: it was ended by SIGSEGV", 4),
        ("devour", "out of memory", 1),
        ("hold_lock", "the worker died 4 times: it made no progress for", 4),
        ("spoil", "the loss (nan) is not finite", 1),
    ],
)
async def test_a_fault_of_the_worker_costs_its_shard_and_no_heartbeat(
    kit: DaemonKit, deed: str, reason: str, starts: int
) -> None:
    settings = {
        "PYTHONPATH": unruly_workload.install(kit.folder / "packages"),
        "HYPERGPU_NODE_WORKER": "numpy",
        "HYPERGPU_NODE_FIRST_PROGRESS_LIMIT_MS": "6000",
        "HYPERGPU_NODE_WORKER_MEMORY_BYTES": str(1 << 30),
    }
    join = ("join", "--token-file", "-")
    async with asyncio.timeout(200), node(kit.folder / "node", *join, **settings) as process:
        assert process.stdin is not None
        process.stdin.write(token_text(kit.there.token).encode() + b"\n")
        kit.assign(0, 1, workload=unruly_workload.NAME, options=f'{{"deed": "{deed}"}}')
        back = await kit.service.next_said("hand_back")
        kit.assign(0, 2)
        await kit.update()
        process.send_signal(signal.SIGTERM)
        status, text = await wait_for_end(process)
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    events = [each["event"] for each in lines]
    handed_back = events.index("HandBack")
    # The shard after it may need a worker once more, where the last one is gone; one that dies
    # while it starts, as on a busy machine, has died and was never started.
    assert 1 <= sum(each == "a worker was started" for each in events[:handed_back]) <= starts
    assert reason in back.reason
    assert sum(each == "Connected" for each in events) == 1
    assert "LinkLost" not in events
    assert kit.service.longest_silence_s < 3.0
    assert status == 0
