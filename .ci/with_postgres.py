"""Run a command with HYPERGPU_TEST_POSTGRES_URL set, starting a PostgreSQL when none listens.

A server that this script starts lives in a temporary folder and ends with the command. Without a
server the command runs all the same: tests say themselves which of them are missing then.
"""

import getpass
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

VARIABLE = "HYPERGPU_TEST_POSTGRES_URL"
PORT = 5432


def listening_url() -> str | None:
    """Return the address of a server on the standard port that asks this user for no password."""
    users = dict.fromkeys([getpass.getuser(), "postgres"])
    for user in users:
        for database in ("test", "postgres"):
            address = f"{user}@127.0.0.1:{PORT}/{database}"
            try:
                psycopg.connect(f"postgresql://{address}", connect_timeout=20).close()
            except psycopg.OperationalError:
                continue
            return f"postgresql+psycopg://{address}"
    return None


def server_binaries() -> Path | None:
    """Return the folder of the newest installed server's programs."""
    programs = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3])
    )
    if programs:
        return programs[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


def run_as_owner(command: list[str], owner: str | None) -> None:
    """Run a server program, as ``owner`` where one is given: PostgreSQL refuses to run as root."""
    prefix = ["runuser", "-u", owner, "--"] if owner else []
    subprocess.run([*prefix, *command], check=True, stdout=subprocess.DEVNULL, cwd="/")


@contextmanager
def private_server(binaries: Path) -> Iterator[str]:
    """Start a private server without durability, yield its address and remove it afterwards."""
    owner = "postgres" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="hypergpu-postgres-") as folder:
        if owner:
            shutil.chown(folder, owner)
        cluster = f"{folder}/cluster"
        control = [str(binaries / "pg_ctl"), "--pgdata", cluster, "--wait"]
        options = f"-p {PORT} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        initdb = [str(binaries / "initdb"), "--auth=trust", "--username=postgres", "--no-sync"]
        run_as_owner([*initdb, "--pgdata", cluster], owner)
        run_as_owner([*control, "--log", f"{folder}/log", "-o", options, "start"], owner)
        try:
            yield f"postgresql+psycopg://postgres@127.0.0.1:{PORT}/postgres"
        finally:
            run_as_owner([*control, "--mode=fast", "stop"], owner)


def run(command: list[str], url: str | None) -> int:
    """Run the command to its end with the address in its environment and return its exit status."""
    environment = {**os.environ, **({VARIABLE: url} if url else {})}
    return subprocess.run(command, check=False, env=environment).returncode


def main() -> int:
    """Run ``argv[1:]`` and return its exit status."""
    command = sys.argv[1:]
    url = os.environ.get(VARIABLE) or listening_url()
    if url:
        return run(command, url)
    binaries = server_binaries()
    if binaries:
        with private_server(binaries) as private_url:
            return run(command, private_url)
    return run(command, None)


if __name__ == "__main__":
    sys.exit(main())
