"""OpenSSH's server of a test's own, with keys of its own, and an ssh that knows only those."""

import getpass
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from hypergpu.user.cluster.processes import kill_group
from hypergpu.wire.free_ports import free_ports
from tests.programs import find_program

_SERVER = """
AddressFamily {family}
ListenAddress {listen}
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/client_key.pub
GatewayPorts {gateway_ports}
PidFile none
StrictModes no
UsePAM no
"""
_CLIENT = """#!/bin/sh
exec {ssh} -F {folder}/client_config "$@"
"""
_CLIENT_CONFIG = """
IdentityFile {folder}/client_key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile none
"""


class SshServer:
    """A rented machine on loopback.

    Over IPv6 its wildcard address leaves the ports of IPv4 to a coordinator of this machine.
    """

    def __init__(self, folder: Path, *, host: str = "::1", gateway_ports: str = "yes") -> None:
        self.folder = folder
        self.host = host
        (self.port,) = free_ports(1)
        self.log = folder / "sshd.log"
        (folder / "bin").mkdir(parents=True)
        make_key(folder / "host_key")
        make_key(folder / "client_key")
        is_6 = ":" in host
        config = _SERVER.format(
            family="inet6" if is_6 else "inet",
            listen=host,
            port=self.port,
            folder=folder,
            gateway_ports=gateway_ports,
        )
        (folder / "server_config").write_text(config, "utf-8")
        (folder / "client_config").write_text(_CLIENT_CONFIG.format(folder=folder), "utf-8")
        client = folder / "bin" / "ssh"
        client.write_text(_CLIENT.format(ssh=shutil.which("ssh"), folder=folder), "utf-8")
        client.chmod(0o700)
        self.know(folder / "host_key.pub")

    @property
    def destination(self) -> str:
        """What follows ``--via``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{getpass.getuser()}@{host}:{self.port}"

    @property
    def path(self) -> str:
        """A PATH on which ssh has the client's key, and knows this server."""
        return f"{self.folder / 'bin'}:{os.environ['PATH']}"

    def know(self, key: Path | None) -> None:
        """Have the client know this host key; None: none."""
        line = f"[{self.host}]:{self.port} {key.read_text('utf-8')}" if key else ""
        (self.folder / "known_hosts").write_text(line, "utf-8")

    def __enter__(self) -> Self:
        if os.geteuid() == 0:
            # Where it drops its rights; Debian makes it when the service starts.
            Path("/run/sshd").mkdir(exist_ok=True)
        sshd = find_program("sshd")
        assert sshd, "tests of ssh carry the marker needs"
        self._child = subprocess.Popen(
            [sshd, "-D", "-e", "-f", str(self.folder / "server_config")],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._child.stderr is not None
        for line in self._child.stderr:
            if line.startswith("Server listening"):
                return self
        raise AssertionError("sshd ended before it listened")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        kill_group(self._child)
        assert self._child.stderr is not None
        self._child.stderr.close()


def make_key(path: Path) -> None:
    """A key pair without a passphrase: ``path`` and ``path.pub``."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True)
