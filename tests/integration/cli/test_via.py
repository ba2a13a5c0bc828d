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
from tests.integration.cli.conftest import JOIN, PROGRAM, end_and_wait, home
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
        env=home(folder),
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
    ended = subprocess.run(
        words, capture_output=True, check=False, text=True, env=home(folder), cwd=folder
    )
    assert ended.returncode == 0, ended.stderr


def test_node_trains_through_ssh_which_is_killed_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = free_ports(3)
    names = ("--port", "--node-port", "--bulk-port")
    where = [word for name, port in zip(names, ports, strict=True) for word in (name, str(port))]
    with SshServer(tmp_path / "rented") as rented:
        monkeypatch.setenv("PATH", rented.path)
        with program(tmp_path, "up", "--via", rented.destination, *where, "--no-page") as up:
            assert f"nodes come through ::1, whose ports {ports[0]}" in line_of(up, "nodes come")
            token = line_of(up, JOIN).removeprefix(JOIN)
            assert parse_token(token).addresses == (f"[::1]:{ports[0]}",)
            node = ["join", "-", "--worker", "numpy", "--plain", "--state-dir", str(tmp_path / "n")]
            with program(tmp_path, *node) as joined:
                assert joined.stdin is not None
                joined.stdin.write(f"{token}\n")
                joined.stdin.flush()
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
    with pytest.raises(HyperGPUError) as caught, way_through(rented):
        pass
    assert caught.value.reason is Reason.FORWARDING_FAILED
    assert read_state(rented.folder) is None
    return caught.value


def test_changed_host_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SshServer(tmp_path / "rented") as rented:
        monkeypatch.setenv("PATH", rented.path)
        make_key(tmp_path / "other")
        rented.know(tmp_path / "other.pub")
        refused = failure(rented)
    assert "shows another host key than the one that is known here" in refused.detail
    assert f"ssh-keygen -R '[::1]:{rented.port}'" in refused.fix


def test_unknown_host_key_is_refused_with_the_command_that_adds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SshServer(tmp_path / "rented") as rented:
        monkeypatch.setenv("PATH", rented.path)
        rented.know(None)
        refused = failure(rented)
    assert "is not known here" in refused.detail
    assert refused.fix.endswith(f"accept it: ssh {parse_destination(rented.destination)}")


def test_machine_that_opens_ports_on_its_loopback_only_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SshServer(tmp_path / "rented", host="127.0.0.2", gateway_ports="no") as rented:
        monkeypatch.setenv("PATH", rented.path)
        refused = failure(rented)
    assert "on its loopback only, since GatewayPorts is no there" in refused.detail
    assert "GatewayPorts clientspecified" in refused.fix


def test_taken_port_and_refused_keys_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SshServer(tmp_path / "rented") as rented:
        monkeypatch.setenv("PATH", rented.path)
        with way_through(rented) as first:
            ports = first.ports
            way = ForwardedPorts(parse_destination(rented.destination), "::1", "127.0.0.1", ports)
            with pytest.raises(HyperGPUError, match=f"listen port {ports[0]}. It is taken there"):
                Via(way, tmp_path, lambda _: None).__enter__()
        (rented.folder / "client_key.pub").unlink()
        assert "takes none of your keys" in failure(rented).detail


def test_every_ssh_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SshServer(tmp_path / "rented") as rented:
        monkeypatch.setenv("PATH", rented.path)
        with way_through(rented):
            assert [each.name() for each in psutil.Process(os.getpid()).children()].count(
                "ssh"
            ) == 1
        assert [each.name() for each in psutil.Process(os.getpid()).children()].count("ssh") == 0
