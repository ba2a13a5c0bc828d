"""What a new user does: up, join, submit, watch, export; all real processes over TLS."""

import json
import subprocess
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file

from hypergpu.crypto import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.wire.credentials import fetch_authority, parse_token
from tests.integration.cli.conftest import JOB_FILE, JOIN, PROGRAM, Run, home

Lines = list[dict[str, Any]]
Nodes = list[subprocess.Popen[str]]


def test_another_ca_is_refused_before_the_secret_leaves(join_line: str) -> None:
    token = parse_token(join_line.rsplit(maxsplit=1)[-1])
    with pytest.raises(HyperGPUError, match="none of them is CA") as caught:
        fetch_authority(token.addresses[0], Digest(digest_of(b"another CA")))
    assert caught.value.reason is Reason.AUTHORITY_MISMATCH


def test_job_is_watched_to_its_end(first_job: Lines) -> None:
    submitted, *events = first_job
    assert submitted["schema"] == "hypergpu/submitted/1"
    assert [event["sequence"] for event in events] == list(range(len(events)))
    kinds = [event["kind"] for event in events]
    assert kinds.count("RoundRecorded") == 6
    assert kinds.count("UpdateReceived") == 12


def test_job_is_listed_and_shown(hypergpu: Run, first_job: Lines) -> None:
    job = json.loads(hypergpu("job", "ls", "--json").stdout)["jobs"][0]
    assert job["id"] == first_job[0]["job"]
    assert (job["phase"], job["round"], job["updates_accepted"]) == ("finished", 6, 12)
    assert job["metric"] > 0.5
    assert "finished: all rounds are done" in hypergpu("job", "show", "first").stdout


def test_model_is_exported_as_the_job_names_it(
    hypergpu: Run, first_job: Lines, folder: Path
) -> None:
    ended = hypergpu("job", "export", "first", "--out", "model", "--json")
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    job = json.loads(hypergpu("job", "show", first_job[0]["job"], "--json").stdout)["job"]
    assert told["digest"] == job["model"]
    tensors = load_file(folder / "model" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "bias": (10,),
        "weight": (64, 10),
    }
    assert job["id"] in (folder / "model" / "README.md").read_text("utf-8")


def test_nodes_are_listed_with_what_they_did(hypergpu: Run, first_job: Lines) -> None:
    found = json.loads(hypergpu("node", "ls", "--json").stdout)["nodes"]
    accepted = [event["kind"] for event in first_job[1:]].count("UpdateReceived")
    assert sum(node["updates_accepted"] for node in found) >= accepted
    assert {node["worker"] for node in found} == {"numpy"}
    assert {"machine-1", "machine-2"} <= {node["name"] for node in found}


def test_revoked_token_lets_nobody_in(hypergpu: Run) -> None:
    made = json.loads(hypergpu("token", "create", "--json", "--ttl", "5m").stdout)
    assert hypergpu("token", "revoke", made["id"]).returncode == 0
    ended = hypergpu("join", made["token"], "--worker", "numpy", "--state-dir", "revoked")
    assert ended.returncode == Reason.TOKEN_REVOKED.exit_code, ended.stderr
    assert ended.stderr.startswith(f"error 1103: token {made['id']} was revoked. Fix: ")
    assert ended.stderr.count("\n") == 1


def test_joined_node_shows_its_token_to_nobody(join_line: str, folder: Path) -> None:
    words = ["join", join_line.removeprefix(JOIN), "--worker", "numpy", "--state-dir", "guest"]
    guest = subprocess.Popen(
        [*PROGRAM, *words], stderr=subprocess.PIPE, text=True, env=home(folder), cwd=folder
    )
    assert guest.stderr is not None
    with guest.stderr:
        assert any('"Connected"' in line for line in guest.stderr)
        shown = psutil.Process(guest.pid).cmdline()
        guest.terminate()
        guest.stderr.read()
    assert guest.wait(240) == 0
    assert "gpu_node" in shown
    assert not any("hgpu1." in word for word in shown)


def test_users_token_cannot_join_a_node(hypergpu: Run) -> None:
    made = json.loads(hypergpu("token", "create", "--role", "user", "--json").stdout)
    ended = hypergpu("join", made["token"])
    assert ended.returncode == Reason.ROLE_FORBIDDEN.exit_code
    assert "one for a user" in ended.stderr


def test_user_may_not_list_tokens(hypergpu: Run, folder: Path) -> None:
    made = json.loads(hypergpu("token", "create", "--role", "user", "--json").stdout)
    (folder / "user.token").write_text(made["token"], "utf-8")
    assert hypergpu("job", "ls", "--token-file", "user.token").returncode == 0
    assert hypergpu("node", "ls", "--token-file", "user.token").returncode == 0
    ended = hypergpu("token", "ls", "--token-file", "user.token")
    assert ended.returncode == Reason.ROLE_FORBIDDEN.exit_code


@pytest.mark.usefixtures("nodes")
def test_ended_job_is_removed(hypergpu: Run, folder: Path) -> None:
    (folder / "second.toml").write_text(JOB_FILE.format(name="second", rounds=1, nodes=1), "utf-8")
    assert hypergpu("job", "submit", "second.toml", "--watch").returncode == 0
    assert "removed" in hypergpu("job", "rm", "second", "--yes").stdout
    assert hypergpu("job", "show", "second").returncode == Reason.JOB_UNKNOWN.exit_code


def test_doctor_finds_the_coordinator(hypergpu: Run) -> None:
    ended = hypergpu("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(ended.stdout)["checks"]}
    assert checks["coordinator"]["verdict"] == "ok"
    assert checks["data_dir"]["verdict"] == "ok"


def test_drained_node_leaves_and_its_program_ends(hypergpu: Run, nodes: Nodes) -> None:
    # The last test that needs nodes: this one takes one of them away.
    node = json.loads(hypergpu("node", "ls", "--json").stdout)["nodes"][0]["id"]
    ended = hypergpu("node", "drain", node)
    assert ended.returncode == 0, ended.stderr
    with ThreadPoolExecutor(len(nodes)) as waiting:
        done = [waiting.submit(child.wait, 240) for child in nodes]
        first, _ = wait(done, return_when=FIRST_COMPLETED)
        for child in nodes:
            child.terminate()
    assert next(each.result() for each in first) == 0
