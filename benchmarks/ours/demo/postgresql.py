"""A PostgreSQL of this machine's own packages over a folder: a database to try things with."""

import os
import queue
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.leash import leash_command
from hypergpu.user.cluster.processes import kill_group
from hypergpu.wire.free_ports import free_ports

OWNER = "postgres"
"""The user that Debian's packages make: as root the server refuses to run."""
_PACKAGES = Path("/usr/lib/postgresql")
_PROGRAMS = ("initdb", "postgres")
_LOOPBACK = "127.0.0.1"
_READY = "database system is ready to accept connections"
_END_WITHIN_S = 20.0
_PASSWORD_BYTES = 16
# Its messages are read.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}


def server_programs(packages: Path = _PACKAGES) -> Path:
    """The folder of the server's programs: the newest of Debian's packages, or pg_config's.

    Raises:
        HyperGPUError: MACHINE_UNFIT, there is none.
    """
    versions = [each for each in packages.glob("*/bin") if each.parent.name.isdigit()]
    newest_first = sorted(versions, key=lambda each: int(each.parent.name), reverse=True)
    for folder in (*newest_first, *_named_by_pg_config(), *_on_path()):
        if all((folder / name).is_file() for name in _PROGRAMS):
            return folder
    fix = "install it: apt-get install postgresql"
    raise HyperGPUError(Reason.MACHINE_UNFIT, "there is no PostgreSQL server here", fix=fix)


def _named_by_pg_config() -> list[Path]:
    try:
        process = subprocess.run(["pg_config", "--bindir"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [Path(os.fsdecode(process.stdout).strip())]


def _on_path() -> list[Path]:
    program_path = shutil.which("initdb")
    return [Path(program_path).resolve().parent] if program_path else []


def _owner_prefix() -> list[str]:
    """Words before a command that run it as the server's user; none where this is not root.

    Raises:
        HyperGPUError: MACHINE_UNFIT, this is root, and there is no such user.
    """
    if os.geteuid():
        return []
    import pwd

    try:
        owner = pwd.getpwnam(OWNER)
    except KeyError:
        detail = f"as root PostgreSQL runs as the user {OWNER}, who is not here"
        fix = f"make the user: useradd --system {OWNER}; or run this as another user than root"
        raise HyperGPUError(Reason.MACHINE_UNFIT, detail, fix=fix) from None
    ids = [f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups"]
    return ["setpriv", *ids, "--pdeathsig", "QUIT"]


def check_installed() -> None:
    """Look for what a server needs, and start nothing.

    Raises:
        HyperGPUError: MACHINE_UNFIT, something is missing.
    """
    server_programs()
    _owner_prefix()


class PostgresServer:
    """The server, on loopback and a free port, with a password; its database ends with it."""

    def __init__(self, folder: Path, log: Path) -> None:
        """Find the programs.

        Args:
            folder: Gets the database. As root a temporary folder does where the server's user
                cannot enter that one.
            log: Gets what it says.

        Raises:
            HyperGPUError: MACHINE_UNFIT, there are none.
        """
        self._programs = server_programs()
        self._prefix = _owner_prefix()
        self._folder = folder
        self._log = log
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._password = secrets.token_hex(_PASSWORD_BYTES)
        self._child: subprocess.Popen[str] | None = None
        self.address = ""
        """Host and port, once it runs."""

    @property
    def url(self) -> str:
        """Address of the database, which holds the password."""
        return f"postgresql://{OWNER}:{self._password}@{self.address}/postgres"

    def __enter__(self) -> Self:
        """Make a database and wait until it takes connections. Call from the main thread.

        Raises:
            HyperGPUError: CHILD_ENDED, it does not start.
        """
        try:
            self._folder = self._made_folder()
            self._initialise()
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _made_folder(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._prefix:
            return self._folder
        shutil.chown(self._folder, OWNER, OWNER)
        command = [*self._prefix, "test", "-w", str(self._folder.resolve())]
        process = subprocess.run(command, check=False)
        if process.returncode == 0:
            return self._folder
        self._temporary = tempfile.TemporaryDirectory(prefix="hypergpu-postgresql-")
        shutil.chown(self._temporary.name, OWNER, OWNER)
        return Path(self._temporary.name)

    @property
    def _cluster(self) -> str:
        return str((self._folder / "cluster").resolve())

    def _initialise(self) -> None:
        password = self._folder / "password"
        password.touch(mode=0o600)
        password.write_text(f"{self._password}\n")
        if self._prefix:
            shutil.chown(password, OWNER, OWNER)
        words = [f"--username={OWNER}", "--auth=scram-sha-256", f"--pwfile={password.resolve()}"]
        process = subprocess.run(
            [
                *(*self._prefix, str(self._programs / "initdb"), "--no-locale", "--encoding=UTF8"),
                *(*words, "--pgdata", self._cluster),
            ],
            check=False,
            capture_output=True,
            text=True,
            env=_ENVIRONMENT,
            cwd="/",
        )
        password.unlink()
        if process.returncode:
            raise HyperGPUError(
                Reason.CHILD_ENDED, f"PostgreSQL made no database: {process.stderr.strip()}"
            )

    def _start(self) -> None:
        (port,) = free_ports(1)
        settings = {"listen_addresses": _LOOPBACK, "unix_socket_directories": "", "port": str(port)}
        words = [word for name, each in settings.items() for word in ("-c", f"{name}={each}")]
        command = [str(self._programs / "postgres"), "-D", self._cluster, *words]
        # The leash does not outlast a change of the user: `setpriv` ties one anew.
        self._child = child = subprocess.Popen(
            [*self._prefix, *command] if self._prefix else leash_command(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=_ENVIRONMENT,
            cwd="/",
        )
        self.address = f"{_LOOPBACK}:{port}"
        assert child.stdout is not None  # noqa: S101 - a pipe
        news: queue.SimpleQueue[bool] = queue.SimpleQueue()
        args = (child.stdout, self._log, news)
        threading.Thread(target=_keep_lines, args=args, daemon=True).start()
        if not news.get():
            detail = f"PostgreSQL ended before it took connections: see {self._log}"
            raise HyperGPUError(Reason.CHILD_ENDED, detail)

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            # It ends every session, and leaves nothing in shared memory.
            child.send_signal(signal.SIGINT)
            try:
                child.wait(_END_WITHIN_S)
            except subprocess.TimeoutExpired:
                kill_group(child)
        shutil.rmtree(self._cluster, ignore_errors=True)
        if self._temporary is not None:
            self._temporary.cleanup()


def _keep_lines(lines: IO[str], log: Path, news: "queue.SimpleQueue[bool]") -> None:
    """Write what it says into a file; tell that it takes connections, and that it has ended."""
    with lines, log.open("a", encoding="utf-8") as log_file:
        for line in lines:
            log_file.write(line)
            log_file.flush()
            if _READY in line:
                news.put(True)
    news.put(False)
