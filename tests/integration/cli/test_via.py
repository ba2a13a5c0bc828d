"""`hypergpu up --via`: nodes come through a real sshd, whose key is checked; ssh is killed."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.cluster.ssh import parse_destination
from hypergpu.user.cluster.via import ForwardedPorts, Via, read_state
from hypergpu.wire.credentials import parse_token
from hypergpu.wire.free_ports import free_ports
from tests.integration.cli.conftest import JOIN, PROGRAM, end_and_wait, warm_home
from tests.processes import processes_left
from tests.ssh_server import SshServer, make_key

pytestmark = pytest.mark.needs("sshd")

JOB = """
workload = "digits-softmax"
[training]
rounds = 1
nodes = 1
"""


@contextlib.contextmanager
def program(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [*PROGRAM, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=warm_home(folder),
        cwd=folder,
    )
    try:
        yield child
    finally:
        assert end_and_wait(child) == 0
        assert child.stderr is not None
        child.stderr.close()


def line_of(child: subprocess.Popen[str], part: str) -> str:
    assert child.stdout is not None
    return next(line.strip() for line in child.stdout if part in line)


def note_of(child: subprocess.Popen[str], part: str) -> str:
    assert child.stderr is not None
    return next(line.strip() for line in child.stderr if part in line)


def train_a_round(folder: Path) -> None:
    (folder / "job.toml").write_text(JOB, "utf-8")
    words = [*PROGRAM, "job", "submit", "job.toml", "--watch"]
    process = subprocess.run(
        words, capture_output=True, check=False, text=True, env=warm_home(folder), cwd=folder
    )
    assert process.returncode == 0, process.stderr


def test_node_trains_through_ssh_which_is_killed_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = free_ports(3)
    names = ("--port", "--node-port", "--bulk-port")
    where = [word for name, port in zip(names, ports, strict=True) for word in (name, str(port))]
    with SshServer(tmp_path / "rented") as ssh_server:
        monkeypatch.setenv("PATH", ssh_server.path)
        with program(tmp_path, "up", "--via", ssh_server.destination, *where, "--no-page") as up:
            assert f"nodes come through ::1, whose ports {ports[0]}" in line_of(up, "nodes come")
            token = line_of(up, JOIN).removeprefix(JOIN)
            assert parse_token(token).addresses == (f"[::1]:{ports[0]}",)
            node = ["join", "-", "--worker", "numpy", "--plain", "--state-dir", str(tmp_path / "n")]
            with program(tmp_path, *node) as join_process:
                assert join_process.stdin is not None
                join_process.stdin.write(f"{token}\n")
                join_process.stdin.flush()
                train_a_round(tmp_path)
                data_dir = tmp_path / "data" / "hypergpu" / "coordinator"
                kill_ssh_of(up)
                assert "Again in 1 s." in note_of(up, "via ")
                note_of(up, "the ports are open again")
                state = read_state(data_dir)
                assert state is not None
                assert (state.is_up, state.ports) == (True, ports)
                train_a_round(tmp_path)
        assert read_state(data_dir) is None
    assert processes_left(tmp_path) == []


def kill_ssh_of(up: subprocess.Popen[str]) -> None:
    (ssh,) = [each for each in psutil.Process(up.pid).children() if each.name() == "ssh"]
    ssh.kill()


def way_through(rented: SshServer, target: str = "127.0.0.1") -> Via:
    """A way through the machine to a port at which nobody listens."""
    way = ForwardedPorts(parse_destination(rented.destination), rented.host, target, free_ports(1))
    return Via(way, rented.folder, lambda _: None)


def failure(rented: SshServer) -> HyperGPUError:
    with pytest.raises(HyperGPUError) as failure, way_through(rented):
        pass
    assert failure.value.reason is Reason.FORWARDING_FAILED
    assert read_state(rented.folder) is None
    return failure.value


def test_changed_host_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SshServer(tmp_path / "rented") as ssh_server:
        monkeypatch.setenv("PATH", ssh_server.path)
        make_key(tmp_path / "other")
        ssh_server.know(tmp_path / "other.pub")
        refusal = failure(ssh_server)
    assert "shows another host key than the one that is known here" in refusal.detail
    assert f"ssh-keygen -R '[::1]:{ssh_server.port}'" in refusal.fix


def test_unknown_host_key_is_refused_with_the_command_that_adds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SshServer(tmp_path / "rented") as ssh_server:
        monkeypatch.setenv("PATH", ssh_server.path)
        ssh_server.know(None)
        refusal = failure(ssh_server)
    assert "is not known here" in refusal.detail
    assert refusal.fix.endswith(f"accept it: ssh {parse_destination(ssh_server.destination)}")


def test_machine_that_opens_ports_on_its_loopback_only_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SshServer(tmp_path / "rented", host="127.0.0.2", gateway_ports="no") as ssh_server:
        monkeypatch.setenv("PATH", ssh_server.path)
        refusal = failure(ssh_server)
    assert "on its loopback only, since GatewayPorts is no there" in refusal.detail
    assert "GatewayPorts clientspecified" in refusal.fix


def test_taken_port_and_refused_keys_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SshServer(tmp_path / "rented") as ssh_server:
        monkeypatch.setenv("PATH", ssh_server.path)
        with way_through(ssh_server) as first:
            ports = first.ports
            way = ForwardedPorts(
                parse_destination(ssh_server.destination), "::1", "127.0.0.1", ports
            )
            with pytest.raises(HyperGPUError, match=f"listen port {ports[0]}. It is taken there"):
                Via(way, tmp_path, lambda _: None).__enter__()
        (ssh_server.folder / "client_key.pub").unlink()
        assert "takes none of your keys" in failure(ssh_server).detail


def test_every_ssh_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SshServer(tmp_path / "rented") as ssh_server:
        monkeypatch.setenv("PATH", ssh_server.path)
        with way_through(ssh_server):
            assert [each.name() for each in psutil.Process(os.getpid()).children()].count(
                "ssh"
            ) == 1
        assert [each.name() for each in psutil.Process(os.getpid()).children()].count("ssh") == 0
