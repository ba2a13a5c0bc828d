"""`hypergpu netsim run`: a world's job on real programs, with what goes wrong in it."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integration.netsim.shaped import (
    END_WITHIN_S,
    NETSIM,
    OPENABLE,
    OURS,
    descendants,
    namespaces_left,
    still_alive,
)

WORLD = f"""
seed = 3
[job]
workload = "digits-softmax"
[job.training]
rounds = 3
inner_steps = 5
nodes = 3
[job.round]
deadline = "5s"
quorum = 0.6
[[nodes]]
name = "{OURS}"
profile = "home-fibre"
[[nodes]]
name = "cellar"
profile = "home-cable"
[[nodes]]
name = "farm"
profile = "home-dsl"
[[faults]]
kind = "crash"
nodes = "cellar"
at = "100ms"
for = "400ms"
[[faults]]
kind = "partition"
nodes = "farm"
at = "100ms"
for = "300ms"
"""


@pytest.fixture
def world(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(WORLD, "utf-8")
    return path


def run(world: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*NETSIM, "run", str(world), "--out", str(world.parent / "out"), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A node whose link was cut is there again at once.
        env={**os.environ, "HYPERGPU_NODE_RECONNECT_CAP_MS": "500", "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("backend", OPENABLE)
def test_a_worlds_job_ends_with_a_report_whatever_goes_wrong(backend: str, world: Path) -> None:
    child = run(world, "--backend", backend, "--worker", "numpy", "--json")
    out, err = child.communicate(timeout=2 * END_WITHIN_S)
    report = json.loads(out)
    assert report["phase"] == "finished", err
    assert child.returncode == (0 if report["verdict"]["is_valid"] else 1)
    assert (report["world"], report["seed"], report["backend"]) == ("small", 3, backend)
    assert [each["number"] for each in report["rounds"]] == [*range(1, len(report["rounds"]) + 1)]
    assert report["metric"] is not None
    ends = [each["ended_ms"] for each in report["rounds"]]
    assert ends == sorted(ends)
    assert ends[0] >= report["rounds"][0]["duration_ms"]
    assert (report["strategy"], report["target"], report["to_target"]) == ("aware", 0.0, None)
    before, *_, evaluation = report["evaluations"]
    assert (before["round"], before["bytes_up"]) == (0, 0)
    assert evaluation["metric"] == report["metric"]
    assert evaluation["bytes_up"] == sum(each["bytes_up"] for each in report["rounds"])
    logs = {each.stem for each in (world.parent / "out" / "logs").iterdir()}
    assert logs == {"coordinator", OURS, "cellar", "farm"}
    assert namespaces_left() == []


def test_what_goes_wrong_is_said_and_a_killed_run_leaves_no_program(world: Path) -> None:
    text = WORLD.replace("rounds = 3", "rounds = 1000")
    world.write_text(text, "utf-8")
    child = run(world, "--worker", "numpy")
    assert child.stdout is not None
    awaited_lines = {"SIGKILL to cellar", "cellar is started again", "the link of farm is cut"}
    for line in child.stdout:
        awaited_lines.discard(line.strip())
        if not awaited_lines:
            break
    assert awaited_lines == set()
    descendant_list = descendants(child.pid)
    assert (
        len(descendant_list) >= 6
    )  # the proxies, the job's program, a coordinator and three nodes
    child.kill()
    child.communicate(timeout=END_WITHIN_S)
    assert still_alive(descendant_list) == []


def test_a_job_that_takes_too_long_is_given_up_and_nothing_runs_on(world: Path) -> None:
    world.write_text(WORLD.replace("rounds = 3", "rounds = 1000"), "utf-8")
    child = run(world, "--worker", "numpy", "--give-up-after", "1")
    _, err = child.communicate(timeout=END_WITHIN_S)
    assert child.returncode == 16
    assert "not done after 1 s" in err
    assert "--give-up-after" in err
    assert f"logs: {world.parent / 'out' / 'logs'}" in err


def test_a_run_that_is_told_to_end_ends_its_programs(world: Path) -> None:
    world.write_text(WORLD.replace("rounds = 3", "rounds = 1000"), "utf-8")
    child = run(world, "--worker", "numpy")
    assert child.stdout is not None
    for line in child.stdout:
        if "joined" in line:
            break
    descendant_list = descendants(child.pid)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=END_WITHIN_S)
    assert child.returncode == 128 + signal.SIGTERM
    assert still_alive(descendant_list) == []
