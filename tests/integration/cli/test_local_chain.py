"""The chain that `hypergpu up` names: killed, started again, found where it was; or away."""

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest

from hypergpu.chain.local.anvil import AnvilOptions, running_anvil
from hypergpu.chain.rpc.client import Call, HttpRpc
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.cli.demo.settlement import settled
from hypergpu.cli.ledger.showing import ledger_of, verification_of
from hypergpu.client import Coordinator
from hypergpu.cluster.coordinator import ReadyLine, operator
from hypergpu.wire.ports import free_ports
from tests.integration.cli.conftest import PROGRAM, ended, home, start
from tests.integration.cli.test_up import ANYWHERE, join_line, profile, up
from tests.processes import UNREAD

SETTLED = re.compile(
    r"jobs that pay are settled on chain 31337 at (http://127\.0\.0\.1:\d+), "
    r"by the ledger (0x[0-9a-f]{40})"
)
JOB = """
workload = "digits-softmax"
[training]
rounds = 24
nodes = 2
inner_steps = 5
[pay]
unit_price = 1000000
rounds_per_epoch = 4
"""
KILLED_AT = 5
"""The round at whose measuring Anvil is killed."""
LOOKS_MOST = 100_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    settings = tmp_path / "config" / "hypergpu" / "config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text('chain = "anvil"\n', "utf-8")
    return tmp_path


def settled_at(said: list[str]) -> tuple[str, str]:
    """The RPC and the ledger that `up` has named."""
    (found,) = filter(None, map(SETTLED.fullmatch, said))
    return found[1], found[2]


def anvil_at(url: str) -> psutil.Process:
    """The chain's own process."""
    port = url.rpartition(":")[2]
    (found,) = [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] == "anvil" and port in (process.info["cmdline"] or ())
    ]
    return found


@contextmanager
def two_nodes(folder: Path, token: str) -> Iterator[None]:
    children = []
    for number in range(2):
        words = ["join", "-", "--worker", "numpy", "--state-dir", str(folder / f"node-{number}")]
        child = start(words, folder)
        assert child.stdin is not None
        child.stdin.write(token + "\n")
        child.stdin.close()
        children.append(child)
    try:
        yield
    finally:
        assert [ended(child) for child in children] == [0, 0]


def trained_through_a_kill(folder: Path, url: str) -> str:
    """Train a job in whose midst the chain is killed; gives the job's id."""
    (folder / "job.toml").write_text(JOB, "utf-8")
    watching = subprocess.Popen(
        [*PROGRAM, "job", "submit", "job.toml", "--watch", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env=home(folder),
        cwd=folder,
    )
    assert watching.stdout is not None
    job_id, metered = "", []
    with watching.stdout:
        for line in watching.stdout:
            told = json.loads(line)
            job_id = job_id or told.get("job", "")
            if told.get("kind") == "RoundMetered":
                metered.append(told["body"]["round"])
                if metered[-1] == KILLED_AT:
                    anvil_at(url).kill()
    assert watching.wait(240) == 0
    assert metered == list(range(24))
    return job_id


def log_of(folder: Path) -> str:
    return (folder / "data/hypergpu/coordinator/coordinator.log").read_text("utf-8")


def until_well(client: Coordinator, job_id: str, folder: Path, starts: int) -> None:
    """Look until the chain was started again so often, and nothing is complained of any more."""
    complaint = ""
    for _ in range(LOOKS_MOST):
        found = log_of(folder).count("the local chain was started again")
        chain = client.ledger(job_id).chain
        assert chain.halted == ""
        complaint = chain.complaint
        if found == starts and not complaint:
            return
    raise AssertionError(complaint)


def pass_time(url: str) -> None:
    """Let the chain's clock go ten seconds a block."""
    rpc = HttpRpc(HttpTransport(url))
    rpc.call(Call("anvil_setBlockTimestampInterval", (10,)))
    rpc.close()


def test_a_chain_that_is_killed_comes_back_and_everything_is_paid_once(folder: Path) -> None:
    with up(folder) as said, two_nodes(folder, join_line(said)):
        url, ledger = settled_at(said)
        job_id = trained_through_a_kill(folder, url)
        known = profile(folder)
        with operator(ReadyLine(known["address"], known["token_file"])) as client:
            until_well(client, job_id, folder, 1)
            anvil_at(url).kill()
            until_well(client, job_id, folder, 2)
            pass_time(url)
            paid = settled(client, job_id, UNREAD)
            view, found = ledger_of(client, job_id), verification_of(client, job_id)
    assert (paid.receipts, paid.paid) == (48, paid.earned)
    assert paid.earned == int(view.spent) > 0
    assert (view.contract, found.faults) == (ledger, [])
    assert view.chain is not None
    assert (view.chain.url, view.chain.complaint, view.chain.halted) == (url, "", "")
    assert all(node.paid == node.earned for node in view.nodes)
    log = log_of(folder)
    assert log.count("the local chain ended by itself") == 2
    assert log.count("the local chain was started again") == 2


def test_the_chain_is_where_it_was_at_the_next_start(folder: Path) -> None:
    with up(folder) as said:
        first = settled_at(said)
    with up(folder) as said:
        assert settled_at(said) == first


def test_a_chain_whose_port_is_taken_says_where_it_is_now(folder: Path) -> None:
    with up(folder) as said:
        url, ledger = settled_at(said)
    port = int(url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)), up(folder) as said:
        other, same = settled_at(said)
    assert (other != url, same) == (True, ledger)
    now = other.rpartition(":")[2]
    assert said[2] == f"note: the chain's port {port} is taken by another program; it has {now}"


def test_a_chain_that_is_away_is_said_and_its_ledger_once_it_is_known(folder: Path) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    settings = folder / "config" / "hypergpu" / "config.toml"
    settings.write_text(f'chain = "{url}"\n', "utf-8")
    # It was asked before, and so is known to be of this chain.
    known = folder / "data" / "hypergpu" / "coordinator" / "chain" / "known.json"
    known.parent.mkdir(parents=True)
    known.write_text(json.dumps({"url": url, "chain_id": 31337}), "utf-8")
    child = subprocess.Popen(
        [*PROGRAM, "up", *ANYWHERE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=home(folder),
    )
    assert child.stdout is not None
    said = lines_until(child.stdout, "Ctrl-C ends it")
    assert said[1] == (
        f"jobs that pay are settled on chain 31337 at {url}, its ledger is not known yet"
    )
    assert said[2] == (
        "note: settling waits, and is tried again and again: the chain's RPC at"
        f" {url} did not answer: nobody listens there"
    )
    with running_anvil(AnvilOptions(port=port), log=folder / "anvil.log"):
        (line,) = lines_until(child.stdout, "the ledger is ")
        assert ended(child) == 0
    assert re.fullmatch(rf"the ledger is 0x[0-9a-f]{{40}}, by {url}", line)


def lines_until(stream: IO[str], beginning: str) -> list[str]:
    lines = []
    for line in stream:
        lines.append(line.strip())
        if line.startswith(beginning):
            return lines
    raise AssertionError(lines)
