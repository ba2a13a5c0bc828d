"""What a new user does: up, join, submit, watch, export; all real processes over TLS."""

import json
import os
import pty
import signal
import stat
import subprocess
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.wire.authority import fetch_authority
from hypergpu.wire.credentials import parse_token
from tests.integration.cli.conftest import JOIN, PROGRAM, Run, home

Lines = list[dict[str, Any]]
Nodes = list[subprocess.Popen[str]]
STATED_SAMPLES = 6 * 20 * 32 * 2
"""What the first job's file states: rounds x inner steps x batch x nodes."""


def test_another_ca_is_refused_before_the_secret_leaves(join_line: str) -> None:
    token = parse_token(join_line.rsplit(maxsplit=1)[-1])
    with pytest.raises(HyperGPUError, match="none of them is CA") as failure:
        fetch_authority(token.addresses[0], Digest(digest_of(b"another CA")))
    assert failure.value.reason is Reason.AUTHORITY_MISMATCH


def count(first_job: Lines, kind: str) -> int:
    """How many of the job's events are of a kind; plans decide how many rounds there are."""
    return [event["kind"] for event in first_job[1:]].count(kind)


def test_job_is_watched_to_its_end(first_job: Lines) -> None:
    submission, *events = first_job
    assert submission["schema"] == "hypergpu/submitted/1"
    assert [event["sequence"] for event in events] == list(range(len(events)))
    assert count(first_job, "RoundRecorded") == count(first_job, "AggregateReady") > 0


def test_job_is_listed_and_shown(hypergpu: Run, first_job: Lines) -> None:
    job = json.loads(hypergpu("job", "ls", "--json").stdout)["jobs"][0]
    assert job["id"] == first_job[0]["job"]
    rounds, updates = (count(first_job, kind) for kind in ("RoundRecorded", "UpdateReceived"))
    assert (job["phase"], job["round"], job["updates_accepted"]) == ("finished", rounds, updates)
    assert job["samples"] >= STATED_SAMPLES
    assert job["metric"] > 0.5
    assert "finished: all rounds are done" in hypergpu("job", "show", "first").stdout


def test_a_watch_writes_each_round_to_tensorboard_once(
    hypergpu: Run, first_job: Lines, folder: Path
) -> None:
    for _ in range(2):
        process = hypergpu("job", "watch", "first", "--log", "tensorboard:curves")
        assert process.returncode == 0, process.stderr
    accumulator = EventAccumulator(str(folder / "curves" / f"first-{first_job[0]['job']}"))
    accumulator.Reload()
    rounds = count(first_job, "RoundRecorded")
    assert [each.step for each in accumulator.Scalars("round/samples")] == [*range(1, rounds + 1)]
    evaluated_rounds = [each.step for each in accumulator.Scalars("evaluation/accuracy")]
    assert (evaluated_rounds[0], evaluated_rounds[-1]) == (0, rounds)
    assert evaluated_rounds == sorted(set(evaluated_rounds))


def test_model_is_exported_as_the_job_names_it(
    hypergpu: Run, first_job: Lines, folder: Path
) -> None:
    process = hypergpu("job", "export", "first", "--out", "model", "--json")
    assert process.returncode == 0, process.stderr
    answer = json.loads(process.stdout)
    job = json.loads(hypergpu("job", "show", first_job[0]["job"], "--json").stdout)["job"]
    assert answer["digest"] == job["model"]
    tensors = load_file(folder / "model" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "bias": (10,),
        "weight": (64, 10),
    }
    assert job["id"] in (folder / "model" / "README.md").read_text("utf-8")


def test_nodes_are_listed_with_what_they_did(hypergpu: Run, first_job: Lines) -> None:
    nodes = json.loads(hypergpu("node", "ls", "--json").stdout)["nodes"]
    accepted_count = count(first_job, "UpdateReceived")
    assert sum(node["updates_accepted"] for node in nodes) >= accepted_count
    assert {node["worker"] for node in nodes} == {"numpy"}
    assert {"machine-1", "machine-2"} <= {node["name"] for node in nodes}


def statuses(hypergpu: Run, folder: Path) -> list[dict[str, Any]]:
    """What `hypergpu status` says of each node of this machine."""
    where = [("--state-dir", str(folder / f"node-{number}")) for number in (1, 2)]
    return [json.loads(hypergpu("status", "--json", *each).stdout) for each in where]


def wait_for_accepted(hypergpu: Run, folder: Path, most: int) -> list[dict[str, Any]]:
    """The same once all accepted updates are counted; reports come a bit later.

    The end of a job may overtake the answer to the last update of each node.
    """
    give_up_at_s = time.monotonic() + 60
    while True:
        node_statuses = statuses(hypergpu, folder)
        counted_updates = sum(each["totals"]["accepted"] for each in node_statuses)
        assert counted_updates <= most
        if counted_updates >= most - len(node_statuses):
            return node_statuses
        assert time.monotonic() < give_up_at_s


def test_nodes_of_this_machine_count_what_was_accepted(
    hypergpu: Run, first_job: Lines, folder: Path
) -> None:
    accepted_count = count(first_job, "UpdateReceived")
    first, second = wait_for_accepted(hypergpu, folder, accepted_count)
    assert (first["schema"], first["name"], first["state"]) == (
        "hypergpu/status/1",
        "machine-1",
        "running",
    )
    assert (second["link"]["state"], second["work"], second["log"]) == ("connected", None, None)
    report = folder / "node-1" / "report.json"
    assert stat.S_IMODE(report.stat().st_mode) == 0o600
    process = hypergpu("status", "--state-dir", str(folder / "node-1"))
    assert "connected for" in process.stdout
    assert process.returncode == 0


def test_revoked_token_lets_nobody_in(hypergpu: Run) -> None:
    new_token = json.loads(hypergpu("token", "create", "--json", "--ttl", "5m").stdout)
    assert hypergpu("token", "revoke", new_token["id"]).returncode == 0
    process = hypergpu("join", new_token["token"], "--worker", "numpy", "--state-dir", "revoked")
    assert process.returncode == Reason.TOKEN_REVOKED.exit_code, process.stderr
    assert process.stderr.startswith(f"error 1103: token {new_token['id']} was revoked. Fix: ")
    assert process.stderr.count("\n") == 1


def test_joined_node_shows_its_token_to_nobody(join_line: str, folder: Path) -> None:
    words = ["join", join_line.removeprefix(JOIN), "--worker", "numpy", "--state-dir", "guest"]
    guest = subprocess.Popen(
        [*PROGRAM, *words], stderr=subprocess.PIPE, text=True, env=home(folder), cwd=folder
    )
    assert guest.stderr is not None
    with guest.stderr:
        assert any('"Connected"' in line for line in guest.stderr)
        command_line = psutil.Process(guest.pid).cmdline()
        guest.terminate()
        guest.stderr.read()
    assert guest.wait(240) == 0
    assert "gpu_node" in command_line
    assert not any("hgpu1." in word for word in command_line)


def read_terminal(reader: int) -> str:
    """What a program wrote to a terminal since; empty once nobody has it open."""
    try:
        return os.read(reader, 1 << 16).decode("utf-8", "replace")
    except OSError:
        return ""


def test_node_on_a_terminal_is_shown_there_and_logs_to_a_file(join_line: str, folder: Path) -> None:
    reader, terminal = pty.openpty()
    words = ["join", join_line.removeprefix(JOIN), "--worker", "numpy", "--state-dir", "live"]
    environment = {**home(folder), "TERM": "xterm", "COLUMNS": "80", "NO_COLOR": ""}
    joined_process = subprocess.Popen(
        [*PROGRAM, *words],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    os.close(terminal)
    terminal_text = ""
    while "connected for" not in terminal_text:
        more = read_terminal(reader)
        assert more, terminal_text
        terminal_text += more
    # As a terminal does on Ctrl-C: to everything in its foreground.
    os.killpg(joined_process.pid, signal.SIGINT)
    while more := read_terminal(reader):
        terminal_text += more
    os.close(reader)
    assert joined_process.wait(240) == 0
    assert "Ctrl-C lets it finish or hand back" in terminal_text
    assert "drained, 0 s ago: SIGINT" in terminal_text
    assert '"event"' not in terminal_text
    lines = (folder / "live" / "node.log").read_text("utf-8").splitlines()
    assert {"Connected", "Leave"} <= {json.loads(line)["event"] for line in lines}


def test_doctor_finds_the_coordinator(hypergpu: Run) -> None:
    process = hypergpu("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(process.stdout)["checks"]}
    assert checks["coordinator"]["verdict"] == "ok"
    assert checks["data_dir"]["verdict"] == "ok"


def test_drained_node_leaves_and_its_program_ends(
    hypergpu: Run, nodes: Nodes, folder: Path
) -> None:
    # The last test that needs nodes: this one takes one of them away.
    node = json.loads(hypergpu("node", "ls", "--json").stdout)["nodes"][0]["id"]
    process = hypergpu("node", "drain", node)
    assert process.returncode == 0, process.stderr
    with ThreadPoolExecutor(len(nodes)) as threads:
        waits = [threads.submit(child.wait, 240) for child in nodes]
        first, _ = wait(waits, return_when=FIRST_COMPLETED)
        for child in nodes:
            child.terminate()
    assert next(each.result() for each in first) == 0
    process = hypergpu("status", "--once", "--state-dir", str(folder / "node-1"))
    assert process.returncode == Reason.NODE_STOPPED.exit_code
    assert "drained" in process.stdout
    assert "Fix: start it again: hypergpu join --state-dir" in process.stderr
