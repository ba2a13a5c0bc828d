"""A ring of real nodes behind netsim's lines: tokens a second of one and of many sessions.

`python -m benchmarks.ours.stages.lined_ring BASE FOLDER` prints `LinedRates` as JSON; it runs over
lines by `netsim shape`.
"""

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import msgspec

from benchmarks.ours.cluster import ONE_THREAD, BenchmarkError
from hypergpu.command_line import program
from hypergpu.serving.calls import AnswerToken, ModelCall, Sampling
from hypergpu.sites import told_sites
from hypergpu.user.client import Coordinator
from hypergpu.user.cluster.cluster import LocalCluster
from hypergpu.user.serving.starting import ServeOrder, start_serving, wait_until_ready

STAGES, FLOOR_MS, TOKENS = 3, 40, 28
SESSIONS = (1, 4, 16)
_WARM_TOKENS = 4
"""Tokens of each session before its rate is taken: prompts of others are read meanwhile."""


class LinedRates(msgspec.Struct, frozen=True):
    """What a ring gave."""

    tokens_per_s: dict[int, float]
    """By the number of sessions, all of them together."""
    pass_ms: float
    """Least time of a pass in a stage."""


def lined_rates(base: Path, folder: Path, one_way_ms: int, backend: str = "proxy") -> LinedRates:
    """Rates of a ring whose nodes are so far from the coordinator.

    Args:
        base: The model.
        folder: Holds the run; it is made.
        one_way_ms: Between each node and the coordinator, without jitter and limits of rates; 0:
            there are no lines.
        backend: Of netsim.

    Raises:
        BenchmarkError: There is no answer.
    """
    folder.mkdir()
    inner = program("benchmarks.ours.stages.lined_ring", str(base), str(folder / "run"))
    command = _over_lines(inner, folder, one_way_ms, backend) if one_way_ms else inner
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode or not lines:
        raise BenchmarkError(f"no rates over lines of {one_way_ms} ms: {result.stderr[-2000:]}")
    if "INVALID" in result.stderr:
        raise BenchmarkError(f"lines of {one_way_ms} ms were late: {result.stderr[-2000:]}")
    return msgspec.json.decode(lines[-1], type=LinedRates, strict=False)


def _over_lines(command: list[str], folder: Path, one_way_ms: int, backend: str) -> list[str]:
    line = f"rtt_ms = {2 * one_way_ms}\nup_mbit_s = 0\ndown_mbit_s = 0\n"
    coordinator = "[coordinator]\nrtt_ms = 0\nup_mbit_s = 0\ndown_mbit_s = 0\n"
    world = folder / "lines.toml"
    world.write_text(f'{coordinator}[[nodes]]\nname = "node"\ncount = {STAGES}\n{line}', "utf-8")
    return program("netsim", "shape", "--backend", backend, str(world), "--", *command)


def measure(base: Path, folder: Path) -> LinedRates:
    """Serve a model through a ring, over lines where some are held open, and have it answer."""
    sites = told_sites()
    names = [*sites.nodes] if sites else [f"node-{number}" for number in range(STAGES)]
    with LocalCluster(folder, "torch", sites) as cluster:
        cluster.start_coordinator()
        for name in names:
            state = cluster.state_of(name)
            state.mkdir(parents=True, mode=0o700, exist_ok=True)
            (state / "node.toml").write_text('kinds = ["training", "serve"]\n', "utf-8")
        settings = {**ONE_THREAD, "HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": str(FLOOR_MS)}
        cluster.start_nodes(dict.fromkeys(names, settings))
        with cluster.operator() as client:
            while len(client.nodes()) < STAGES:
                time.sleep(0.2)
            order = ServeOrder(
                str(base), name="lined", stages=STAGES, conversations_most=max(SESSIONS)
            )
            wait_until_ready(client, start_serving(client, order).job)
            rates = {count: _rate(client, count) for count in SESSIONS}
    return LinedRates(rates, float(FLOOR_MS))


def _rate(client: Coordinator, sessions: int) -> float:
    """Tokens a second while all sessions are answered."""
    with ThreadPoolExecutor(sessions) as callers:
        times = [*callers.map(lambda seed: _token_times(client, seed), range(sessions))]
    begin_s = max(each[_WARM_TOKENS] for each in times)
    end_s = min(each[-1] for each in times)
    rates = [_rate_within(each, begin_s, end_s) for each in times]
    return sum(rates)


def _rate_within(times: Sequence[float], begin_s: float, end_s: float) -> float:
    """Rate of one session by the mean time between two tokens of a span."""
    gaps = [late - early for early, late in pairwise(times) if begin_s <= early and late <= end_s]
    return len(gaps) / sum(gaps)


def _token_times(client: Coordinator, seed: int) -> list[float]:
    draws = random.Random(seed)
    prompt = tuple(draws.randrange(4_096) for _ in range(8))
    # Drawn hot, so that nothing repeats and no draft is right.
    rules = Sampling(temperature=3.0, seed=seed)
    call = ModelCall(tokens=prompt, sampling=rules, new_tokens_most=TOKENS)
    return [
        time.monotonic() for part in client.answer("lined", call) if isinstance(part, AnswerToken)
    ]


if __name__ == "__main__":
    rates = measure(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.write(msgspec.json.encode(rates).decode() + "\n")
