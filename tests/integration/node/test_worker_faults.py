"""Faults of a real worker under a real daemon, which lives, is heard throughout, and restarts it at
most three times, each time later.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests import unruly_workload
from tests.integration.node.fake_coordinator import WELCOME, DaemonKit, serve

HEARTBEAT_MS = 300


@pytest.fixture
async def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DaemonKit]:
    monkeypatch.setenv("PYTHONPATH", unruly_workload.install(tmp_path / "packages"))
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    async with serve() as there:
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
    limits = {"first_progress_limit_ms": 6_000, "worker_memory_bytes": 1 << 30}
    kit.settings = kit.settings.model_copy(update=limits)
    with capture_logs() as logs:
        async with asyncio.timeout(200), kit.daemon(kit.there.token):
            kit.assign(0, 1, workload=unruly_workload.NAME, options=f'{{"deed": "{deed}"}}')
            back = await kit.service.next_said("hand_back")
            kit.assign(0, 2)
            await kit.update()
    events = [each["event"] for each in logs]
    handed_back = events.index("HandBack")
    # The shard after it may need a worker once more, where the last one is gone.
    assert sum(each == "a worker was started" for each in events[:handed_back]) == starts
    assert reason in back.reason
    assert sum(each == "Connected" for each in events) == 1
    assert "LinkLost" not in events
    assert kit.service.longest_silence_s < 3.0
