"""`hypergpu netsim shape`: programs over links, told of them, changing them."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import get_args

import msgspec
import psutil
import pytest

from hypergpu.sites import SITES_VARIABLE, Sites, told_sites
from netsim.emulation.requests import Condition, LinkRequestFailed, Reset, SetCondition, SetShape
from netsim.link import NetsimError
from netsim.network import programs
from netsim.network.backends import BACKENDS, profile_links
from netsim.network.options import Backend
from netsim.network.profiles import PROFILES
from netsim.network.programs import controllable
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
    with tempfile.TemporaryDirectory() as folder_name:
        yield Path(folder_name)


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
    descendant_list = descendants(holder.pid)
    holder.send_signal(signal.SIGTERM)
    status, _, err = wait_for_end(holder)
    assert status == 128 + signal.SIGTERM, err
    assert still_alive(descendant_list) == []
    assert leftovers(folder) == []


@pytest.mark.parametrize("backend", OPENABLE)
def test_after_a_kill_the_next_run_finds_nothing_left(backend: str, folder: Path) -> None:
    holder = shape(folder, backend, *WAIT)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "inside\n"
    descendant_list = descendants(holder.pid)
    assert len(descendant_list) >= 2  # the program, and the proxies or the router
    holder.kill()
    wait_for_end(holder)
    assert still_alive(descendant_list) == []
    assert namespaces_left() == []
    status, _, err = wait_for_end(shape(folder, backend, "true"))
    assert status == 0, err
    assert leftovers(folder) == []


def test_links_without_a_program_stay_open_until_they_are_to_close(folder: Path) -> None:
    holder = shape(folder, "proxy")
    assert holder.stdout is not None
    first_line = holder.stdout.readline()
    match = re.fullmatch(rf"export {SITES_VARIABLE}='(.*)'\n", first_line)
    assert match
    sites = told_sites({SITES_VARIABLE: match[1]})
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
    process = subprocess.run(run, capture_output=True, text=True, check=False, timeout=END_WITHIN_S)
    _, line = process.stderr.splitlines()
    assert process.returncode == 16
    assert "needs root" in line
    assert "sudo, or use the proxy" in line


LEASHED = """
import subprocess, sys
from hypergpu.leash import leash_command
child = subprocess.Popen(leash_command(["sh", "-c", "echo inside; exec sleep 1000"]))
print(child.pid, flush=True)
child.wait()
"""


def test_a_leashed_program_dies_with_whoever_started_it() -> None:
    starter = subprocess.Popen([sys.executable, "-c", LEASHED], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    with starter.stdout:
        first_lines = {starter.stdout.readline(), starter.stdout.readline()}
        (pid,) = (int(line) for line in first_lines - {"inside\n"})
        assert starter.poll() is None
        leash_command = psutil.Process(pid)
        starter.kill()
        starter.wait()
        assert still_alive([leash_command]) == []


SERVE = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("serving", flush=True)
while True:
    client, _ = server.accept()
    with client:
        client.sendall(client.recv(1))
"""
DIAL_AND_WAIT = """
import socket, sys
try:
    address, within_s = (sys.argv[1], int(sys.argv[2])), float(sys.argv[3])
    with socket.create_connection(address, within_s) as server:
        server.sendall(b"x")
        print("heard" if server.recv(1) else "closed")
except TimeoutError:
    print("silent")
"""
LONG_S, SHORT_S = 60, 1.5


@asynccontextmanager
async def lan(backend: str = Backend.PROXY) -> AsyncIterator[Sites]:
    async with (
        BACKENDS[Backend(backend)].open(profile_links(["lan"], 0)) as links,
        controllable(links) as sites,
    ):
        yield sites


async def dial(sites: Sites, port: int, within_s: float) -> str:
    (site,) = sites.nodes.values()
    words = [sys.executable, "-c", DIAL_AND_WAIT, site.dials, str(port), str(within_s)]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*site.command(words), stdout=pipe)
    out, _ = await child.communicate()
    return out.decode().strip()


@pytest.mark.parametrize("backend", OPENABLE)
async def test_a_cut_link_is_silent_until_it_is_healed(backend: str) -> None:
    async with lan(backend) as sites:
        port = sites.ports[0] if sites.ports else 7700
        words = [sys.executable, "-c", SERVE, sites.coordinator.dials, str(port)]
        pipe = asyncio.subprocess.PIPE
        command = sites.coordinator.command(words)
        server = await asyncio.create_subprocess_exec(*command, stdout=pipe)
        assert server.stdout is not None
        assert await server.stdout.readline() == b"serving\n"
        assert await dial(sites, port, LONG_S) == "heard"
        await programs.ask_links(sites.control, SetCondition("lan", Condition.CUT))
        assert await dial(sites, port, SHORT_S) == "silent"
        await programs.ask_links(sites.control, SetCondition("lan", Condition.OPEN))
        assert await dial(sites, port, LONG_S) == "heard"
        assert "VALID" in (await programs.read_verdict(sites.control)).sentence
        server.kill()
        await server.wait()


@pytest.mark.parametrize("backend", OPENABLE)
async def test_what_cannot_be_done_is_refused_and_the_links_stay(backend: str) -> None:
    async with lan(backend) as sites:
        with pytest.raises(NetsimError, match="nobody"):
            await programs.ask_links(sites.control, SetCondition("nobody", Condition.CUT))
        if backend != Backend.PROXY:
            with pytest.raises(NetsimError, match="no connection of lan"):
                await programs.ask_links(sites.control, Reset("lan"))
        await programs.ask_links(sites.control, SetShape("lan", PROFILES["D"].shape))
        assert (await programs.read_verdict(sites.control)).sentence


async def test_a_line_that_is_no_request_is_answered_and_the_next_one_heard() -> None:
    async with lan() as sites:
        reader, writer = await asyncio.open_unix_connection(sites.control)
        for line in (b"nonsense\n", b'{"type": "explode"}\n', b'{"type": "reset"}\n'):
            writer.write(line)
            assert b"does not understand" in await reader.readline()
        writer.write(b'{"type": "verdict"}\n')
        assert b"sentence" in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_an_impossible_link_is_refused_at_once_and_the_next_request_heard() -> None:
    request = msgspec.to_builtins(SetShape("lan", PROFILES["D"].shape))
    request["shape"]["link"]["up"]["delay_us"] = -1
    async with lan() as sites:
        reader, writer = await asyncio.open_unix_connection(sites.control)
        writer.write(msgspec.json.encode(request) + b"\n")
        answer = msgspec.json.decode(await reader.readline(), type=LinkRequestFailed)
        assert "delay" in answer.detail
        assert answer.fix
        writer.write(b'{"type": "verdict"}\n')
        assert b"sentence" in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_links_that_are_closed_do_not_answer() -> None:
    async with lan() as sites:
        path = sites.control
    with pytest.raises(NetsimError, match="do not answer"):
        await programs.read_verdict(path)


ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/netsim/programs.md").read_text("utf-8")


@pytest.mark.parametrize("backend", OPENABLE)
def test_the_example_runs(backend: str) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    program = example.replace("Backend.PROXY", f"Backend.{backend.upper()}")
    run = [sys.executable, "-c", program]
    process = subprocess.run(
        run, cwd=ROOT, capture_output=True, text=True, check=False, timeout=END_WITHIN_S
    )
    assert process.returncode == 0, process.stderr
    assert "fetched" in process.stdout
    assert "VALID" in process.stdout


def test_the_page_names_every_field_of_the_sites() -> None:
    assert [name for name in Sites.__struct_fields__ if f"| `{name}` |" not in PAGE] == []


def test_the_page_names_every_request() -> None:
    kinds = get_args(programs.ControlRequest)
    shown_requests = re.findall(r"^\| `(\{.*?\})` \|", PAGE, re.MULTILINE)
    texts = [text.replace("{...}", "null") for text in shown_requests]
    tags = {msgspec.json.decode(text)["type"] for text in texts}
    assert tags == {str(each.__struct_config__.tag) for each in kinds}
