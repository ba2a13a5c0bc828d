"""The worker's sandboxes, each that starts on this machine, around a real worker that tries to get
out.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gpu_node.config import NodeSettings
from gpu_node.core.limits import OwnerLimits
from gpu_node.shell.folder.state import StatePaths
from gpu_node.shell.worker import protocol
from gpu_node.shell.worker_host.sandbox import worker_sandbox
from hypergpu.errors import HyperGPUError
from hypergpu.sandbox.sandbox import (
    Sandbox,
    SandboxKind,
    WorkerFolders,
    chosen_sandbox,
    worker_environment,
)
from tests import unruly_workload
from tests.conformance.worker_process import ShardKit, Subject, spawn_worker

MAY = {"null device", "own folder", "scratch", "home", "inputs", "pair", "child"}


def folders_in(folder: Path) -> WorkerFolders:
    """The folders of a node with a key, another job and a file among its inputs."""
    with StatePaths(folder / "node") as paths:
        paths.identity.write_text("key")
        paths.root.with_name("node.passphrase").write_text("passphrase")
        (paths.jobs / "job-000000000009").mkdir()
        (paths.inputs / "given").write_text("given")
        hidden_paths = (paths.root, paths.root.with_name("node.passphrase"))
        return WorkerFolders((paths.scratch, paths.open_folder), (paths.inputs,), hidden_paths)


def usable_sandbox(kind: SandboxKind, folder: Path) -> Sandbox | None:
    """The sandbox of a kind, if it starts here."""
    try:
        return chosen_sandbox(kind, folders_in(folder))
    except HyperGPUError:
        return None


@pytest.fixture
def sandboxes(tmp_path: Path) -> list[Sandbox]:
    usable_sandboxes = [
        usable_sandbox(kind, tmp_path / kind) for kind in (SandboxKind.BWRAP, SandboxKind.LANDLOCK)
    ]
    return [each for each in usable_sandboxes if each is not None]


def deeds_in(sandbox: Sandbox, packages: str) -> set[str]:
    """What a worker got done."""
    node = sandbox.folders.hidden[0]
    kit = ShardKit(node.parent / "kit", Subject("numpy", "digits-softmax", {}))
    request = msgspec.structs.replace(
        kit.initial_request(0),
        workload=unruly_workload.NAME,
        options={"deed": "escape", "path": str(node)},
    )
    variables = {
        **os.environ,
        "PYTHONPATH": packages,
        "AWS_SECRET_ACCESS_KEY": "secret",
        "HYPERGPU_WORKER_DAEMON": str(os.getpid()),
    }
    folders = sandbox.folders
    readable = (*folders.readable, Path(packages.partition(":")[0]))
    sandbox = sandbox._replace(folders=folders._replace(readable=readable))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        variables["HYPERGPU_WORKER_PORT"] = str(listener.getsockname()[1])
        return _deeds(sandbox, request, variables)


def _deeds(
    sandbox: Sandbox, request: protocol.WriteInitialModel, variables: dict[str, str]
) -> set[str]:
    with spawn_worker("numpy", variables, sandbox) as worker:
        worker.send(request)
        reply = worker.answer()
    assert isinstance(reply, protocol.InitialModelFailed)
    return set(reply.reason.partition("did: ")[2].split(", "))


def test_a_worker_in_a_sandbox_reaches_no_network_no_key_and_no_other_job(
    sandboxes: list[Sandbox], tmp_path: Path
) -> None:
    packages = unruly_workload.install(tmp_path / "packages")
    assert sandboxes, "neither bubblewrap nor landlock starts here"
    for sandbox in sandboxes:
        # In a namespace of its own a worker may open a socket, which leads nowhere.
        empty = {"socket", "unix socket"} if sandbox.kind is SandboxKind.BWRAP else set()
        assert deeds_in(sandbox, packages) - empty == MAY, sandbox.kind


def test_without_a_sandbox_the_same_worker_does_get_out(tmp_path: Path) -> None:
    """The deeds above are tried in earnest."""
    packages = unruly_workload.install(tmp_path / "packages")
    free = chosen_sandbox(SandboxKind.OFF, folders_in(tmp_path))
    deeds = deeds_in(free, packages)
    assert {
        "socket",
        "connect",
        "read key",
        "read passphrase",
        "read another job",
        "signal others",
    } <= deeds
    assert "secret" not in deeds
    (Path(unruly_workload.__file__).with_name("written")).unlink()


def test_the_first_sandbox_that_starts_is_taken(sandboxes: list[Sandbox], tmp_path: Path) -> None:
    assert chosen_sandbox(SandboxKind.AUTO, folders_in(tmp_path)).kind is sandboxes[0].kind


PROGRAM = """
import sys
from pathlib import Path
from hypergpu.sandbox.sandbox import SandboxKind, WorkerFolders, chosen_sandbox
folder = Path(sys.argv[1])
found = chosen_sandbox(SandboxKind.AUTO, WorkerFolders((folder,), (), (folder / "node",)))
print(found.kind, found.text)
"""


def without_bubblewrap(folder: Path) -> str:
    """The choice of a process that finds no bwrap on its path."""
    environment = {"PATH": str(folder), "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    process = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return process.stdout


def test_without_bubblewrap_the_worker_confines_itself_or_is_called_unsandboxed_with_the_fix(
    tmp_path: Path,
) -> None:
    output = without_bubblewrap(tmp_path)
    assert output.startswith("landlock landlock") or (
        output.startswith("off unsandboxed (bwrap: it is not installed; landlock: ")
        and "apt install bubblewrap" in output
    )


def test_a_bubblewrap_that_fails_is_passed_over(tmp_path: Path) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'setting up uid map: Permission denied' >&2\nexit 1\n")
    program.chmod(0o755)
    assert without_bubblewrap(tmp_path).split()[0] in {"landlock", "off"}


def test_a_sandbox_that_the_owner_named_and_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    folders = folders_in(tmp_path)._replace(writable=(Path("/proc/nowhere"),))
    with pytest.raises(HyperGPUError, match=r"the sandbox does not start: bwrap: .*Fix: install"):
        chosen_sandbox(SandboxKind.BWRAP, folders)


def test_a_worker_inherits_what_libraries_need_and_no_secret() -> None:
    kept_variables = {
        "PATH": "/bin",
        "CUDA_HOME": "/cuda",
        "HYPERGPU_WORKER_THREADS": "2",
        "LC_ALL": "C",
    }
    secrets = {
        "HYPERGPU_NODE_PASSPHRASE": "x",
        "HYPERGPU_NODE_TOKEN": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "HF_TOKEN": "x",
        "SSH_AUTH_SOCK": "x",
        "DBUS_SESSION_BUS_ADDRESS": "x",
    }
    assert worker_environment({**kept_variables, **secrets}) == kept_variables


READS = """
import sys
from hypergpu.sandbox.confinement import confine_if_told
confine_if_told()
for mode in ("rb", "ab"):
    try:
        open(sys.argv[1], mode)
        print(mode)
    except OSError:
        pass
"""


def is_readable(sandbox: Sandbox, path: Path) -> bool:
    """Whether a worker can open a file, which it can never write."""
    command = sandbox.command((sys.executable, "-c", READS, str(path)))
    environment = sandbox.environment(os.environ)
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert ran.stdout.split() in ([], ["rb"])
    return bool(ran.stdout)


def test_a_sandboxed_worker_reads_a_jobs_own_folder_and_cannot_write_it(
    sandboxes: list[Sandbox], tmp_path: Path
) -> None:
    own = tmp_path / "srv" / "wards"
    own.mkdir(parents=True)
    (own / "smith.txt").write_text("healthy")
    assert sandboxes
    for sandbox in sandboxes:
        assert not is_readable(sandbox, own / "smith.txt")
        assert is_readable(sandbox.with_readable(own), own / "smith.txt")


def test_data_in_a_folder_that_workers_read_are_seen_by_their_own_jobs_workers_alone(
    sandboxes: list[Sandbox], tmp_path: Path
) -> None:
    packages, alias = tmp_path / "opt", tmp_path / "alias"
    wards, xrays = packages / "wards", packages / "xrays"
    alias.symlink_to(packages)
    for folder in (packages, wards, xrays):
        folder.mkdir()
        (folder / "one.txt").write_text("healthy")
    limits = OwnerLimits(data={"wards": str(alias / "wards"), "xrays": str(xrays)})
    with StatePaths(tmp_path / "node") as paths:
        for kind in [each.kind for each in sandboxes]:
            settings = NodeSettings.model_validate({"sandbox": kind})
            for python in (packages, alias):
                any_job = worker_sandbox(paths, settings, limits, [python])
                own = any_job.with_readable(wards)
                assert is_readable(any_job, python / "one.txt")
                assert not is_readable(any_job, python / "wards" / "one.txt")
                assert is_readable(own, wards / "one.txt")
                assert not is_readable(own, python / "xrays" / "one.txt")
