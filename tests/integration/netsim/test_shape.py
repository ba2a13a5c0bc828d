"""`hypergpu netsim shape`: any program over links, told of them, waited for, and nothing left."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hypergpu.sites import SITES_VARIABLE, told_sites
from tests.integration.netsim.shaped import (
    END_WITHIN_S,
    FAR_RTT_MS,
    NETSIM,
    OPENABLE,
    descendants,
    namespaces_left,
    still_alive,
    world_file,
)

DIAL = """
import socket, sys, time
began_s = time.monotonic()
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=240) as server:
    server.sendall(b"x")
    server.recv(1)
print(time.monotonic() - began_s)
"""
SERVE_AND_DIAL = f"""
import json, os, socket, subprocess, sys, threading
sites = json.loads(os.environ["NETSIM_SITES"])
port = sites["ports"][0] if sites["ports"] else 7700
server = socket.create_server((sites["coordinator"]["dials"], port))
def serve():
    while True:
        client, _ = server.accept()
        client.sendall(client.recv(1))
threading.Thread(target=serve, daemon=True).start()
took = {{}}
for name, site in sites["nodes"].items():
    dial = [*site["prefix"], sys.executable, "-c", {DIAL!r}, site["dials"], str(port)]
    said = subprocess.run(dial, check=True, capture_output=True, text=True).stdout
    took[name] = float(said)
print(json.dumps(took), flush=True)
os._exit(7)
"""
WAIT = ["sh", "-c", "echo inside; exec sleep 1000"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where control sockets are made too: a path that a Unix socket may have."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def shape(folder: Path, backend: str, *command: str) -> "subprocess.Popen[str]":
    behind = ["--", *command] if command else []
    return subprocess.Popen(
        [*NETSIM, "shape", world_file(folder), "--backend", backend, *behind],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def wait_for_end(holder: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = holder.communicate(timeout=END_WITHIN_S)
    return holder.returncode, out, err


def leftovers(folder: Path) -> list[str]:
    sockets = [each.name for each in folder.iterdir() if each.suffix != ".toml"]
    return [*sockets, *namespaces_left()]


@pytest.mark.parametrize("backend", OPENABLE)
def test_a_program_finds_its_sites_and_its_status_is_passed_on(backend: str, folder: Path) -> None:
    status, out, err = wait_for_end(shape(folder, backend, sys.executable, "-c", SERVE_AND_DIAL))
    assert status == 7, err
    assert f"2 links are open ({backend})" in err
    assert re.search(r"^(IN)?VALID: ", err, re.MULTILINE)
    # Connecting takes one round trip and the answer another.
    assert json.loads(out)["far"] >= 2 * FAR_RTT_MS / 1000
    assert leftovers(folder) == []


@pytest.mark.parametrize("backend", OPENABLE)
def test_a_signal_reaches_the_program_and_nothing_is_left(backend: str, folder: Path) -> None:
    holder = shape(folder, backend, *WAIT)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "inside\n"
    started = descendants(holder.pid)
    holder.send_signal(signal.SIGTERM)
    status, _, err = wait_for_end(holder)
    assert status == 128 + signal.SIGTERM, err
    assert still_alive(started) == []
    assert leftovers(folder) == []


@pytest.mark.parametrize("backend", OPENABLE)
def test_after_a_kill_the_next_run_finds_nothing_left(backend: str, folder: Path) -> None:
    holder = shape(folder, backend, *WAIT)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "inside\n"
    started = descendants(holder.pid)
    assert len(started) >= 2  # the program, and the proxies or the router
    holder.kill()
    wait_for_end(holder)
    assert still_alive(started) == []
    assert namespaces_left() == []
    status, _, err = wait_for_end(shape(folder, backend, "true"))
    assert status == 0, err
    assert leftovers(folder) == []


def test_links_without_a_program_stay_open_until_they_are_to_close(folder: Path) -> None:
    holder = shape(folder, "proxy")
    assert holder.stdout is not None
    said = holder.stdout.readline()
    found = re.fullmatch(rf"export {SITES_VARIABLE}='(.*)'\n", said)
    assert found
    sites = told_sites({SITES_VARIABLE: found[1]})
    assert sites is not None
    assert Path(sites.control).is_socket()
    holder.send_signal(signal.SIGINT)
    status, _, err = wait_for_end(holder)
    assert (status, leftovers(folder)) == (0, []), err


def test_a_program_that_there_is_not_is_said_and_nothing_is_left(folder: Path) -> None:
    status, _, err = wait_for_end(shape(folder, "proxy", "no-such-program"))
    assert status == 127
    assert "no-such-program cannot be started" in err
    assert leftovers(folder) == []


UNPRIVILEGED = """
import contextlib, os
from netsim.cli.app import app
def shape(*words):
    app(args=["shape", *words, "--", "true"], prog_name="hypergpu netsim")
with contextlib.suppress(SystemExit):
    shape("no-such-profile")  # Nobody else may read where this interpreter's modules are.
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
shape("lan", "--backend", "tunnel")
"""


def test_without_root_the_tunnel_is_refused_with_what_would_help() -> None:
    run = [sys.executable, "-c", UNPRIVILEGED]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=END_WITHIN_S)
    _, line = done.stderr.splitlines()
    assert done.returncode == 16
    assert "needs root" in line
    assert "sudo, or use the proxy" in line


LEASHED = """
import subprocess, sys
from hypergpu.cluster.leash import leash_command
child = subprocess.Popen(leash_command(["sh", "-c", "echo inside; exec sleep 1000"]))
print(child.pid, flush=True)
child.wait()
"""


def test_a_leashed_program_dies_with_whoever_started_it() -> None:
    starter = subprocess.Popen([sys.executable, "-c", LEASHED], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    with starter.stdout:
        said = {starter.stdout.readline(), starter.stdout.readline()}
        (pid,) = (int(line) for line in said - {"inside\n"})
        assert starter.poll() is None
        leash_command = psutil.Process(pid)
        starter.kill()
        starter.wait()
        assert still_alive([leash_command]) == []
