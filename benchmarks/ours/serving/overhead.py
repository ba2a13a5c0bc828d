"""What the API adds to a call: first tokens by it and without it, at one node, by turns."""

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.ours.cluster import ONE_THREAD
from benchmarks.ours.serving.random_model import save_random_base
from benchmarks.ours.serving.served import served_model
from benchmarks.ours.table import PartFigures
from hypergpu.command_line import program
from hypergpu.serving.calls import ModelCall, Sampling
from hypergpu.user.client import Coordinator
from hypergpu.user.cluster.processes import kill_group, start
from hypergpu.wire.credentials import Role
from netsim.measure.ends import percentile

_WANTED_MS = 5.0
_PROMPT = tuple(range(10, 26))


def overhead_figures(calls: int) -> PartFigures:
    """Differences of first tokens at p50 and p99."""
    through_ms, direct_ms = [], []
    with tempfile.TemporaryDirectory() as name:
        base = save_random_base(Path(name) / "base", width=64, layers=2)
        with (
            served_model(Path(name) / "run", base, ("one",)) as run,
            running_api(Path(name), run.client) as client,
        ):
            for number in range(calls + 5):
                call = ModelCall(
                    tokens=(number, *_PROMPT),
                    sampling=Sampling(temperature=0.0),
                    new_tokens_most=1,
                )
                through_ms.append(_api_first_ms(client, call))
                direct_ms.append(1000 * run.answer(call).at_s[0])
    through_ms, direct_ms = sorted(through_ms[5:]), sorted(direct_ms[5:])
    middle_ms, late_ms = (
        percentile(through_ms, share) - percentile(direct_ms, share) for share in (0.5, 0.99)
    )
    return PartFigures(
        rows=[
            ("first token without the API, p99", f"{percentile(direct_ms, 0.99):.1f} ms", ""),
            ("the API adds, p50", f"{middle_ms:.1f} ms", ""),
            ("the API adds, p99", f"{late_ms:.1f} ms", f"{_WANTED_MS:g} ms"),
        ],
        metrics={"gateway_overhead_ms": late_ms},
        notes=[f"{calls} calls by each way in turns, plain HTTP, one node, a tiny model."],
    )


def _api_first_ms(client: httpx.Client, call: ModelCall) -> float:
    body = {
        "model": "bench",
        "prompt": list(call.tokens or ()),
        "max_tokens": call.new_tokens_most,
        "temperature": 0,
        "stream": True,
    }
    began_s = time.monotonic()
    with client.stream("POST", "completions", content=json.dumps(body)) as answer:
        answer.raise_for_status()
        first_s = 0.0
        for line in answer.iter_lines():
            if line and not first_s:
                first_s = time.monotonic() - began_s
    return 1000 * first_s


@contextmanager
def running_api(folder: Path, coordinator: Coordinator) -> Iterator[httpx.Client]:
    """The API as a process of an operator, and a client with its key."""
    environment = {
        **ONE_THREAD,
        "XDG_CONFIG_HOME": str(folder / "home"),
        "HYPERGPU_TOKEN": coordinator.create_token(Role.OPERATOR, ttl_s=3_600).token,
    }
    command = program("hypergpu.user.cli", "serve", "api", "--port", "0")
    child = start(command, log=folder / "api.log", is_read=True, environment=environment)
    try:
        values = [_value(child) for _ in range(2)]
        headers = {"authorization": f"Bearer {values[1]}", "content-type": "application/json"}
        with httpx.Client(base_url=values[0], headers=headers, trust_env=False) as client:
            yield client
    finally:
        kill_group(child)


def _value(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None  # noqa: S101 - it is read
    return child.stdout.readline().strip().partition("=")[2]
