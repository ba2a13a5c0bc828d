"""Upgrading and uninstalling, and `doctor --fix`."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hypergpu.errors import Reason
from hypergpu.user.cli.doctor import mend
from hypergpu.user.cli.installation import command_line, installation
from hypergpu.user.cli.verdicts import FAIL, OK, WARN, Check
from tests.unit.cli.conftest import Hypergpu

PYTHON = "/env/bin/python"


@pytest.mark.parametrize(
    ("mark", "variables", "kind", "command", "is_ours"),
    [
        ("", {}, "pip, in ", f"{PYTHON} -m pip install --upgrade hypergpu", True),
        ("uv-receipt.toml", {}, "uv tool", "uv tool upgrade hypergpu", True),
        ("pipx_metadata.json", {}, "pipx", "pipx upgrade hypergpu", True),
        ("", {"PEX": "/opt/node.pex"}, "one file, /opt/node.pex", "make node-pex", False),
        ("", {"HYPERGPU_IMAGE": "hypergpu-node"}, "an image", "docker pull hypergpu-node", False),
    ],
)
def test_an_upgrade_goes_the_way_of_the_installation(
    tmp_path: Path,
    mark: str,
    variables: dict[str, str],
    kind: str,
    command: str,
    is_ours: bool,  # noqa: FBT001
) -> None:
    if mark:
        (tmp_path / mark).touch()
    this_installation = installation(tmp_path, PYTHON, variables, None)
    assert this_installation.kind.startswith(kind)
    assert command_line(this_installation.upgrade).startswith(command)
    assert this_installation.is_ours is is_ours


def test_a_clone_is_upgraded_by_its_owner() -> None:
    this_installation = installation(Path("/env"), PYTHON, {}, Path("/a clone"))
    assert not this_installation.is_ours
    assert (
        command_line(this_installation.upgrade)
        == "git -C '/a clone' pull && make -C '/a clone' setup"
    )


def make_places(home: Path) -> tuple[Path, Path]:
    """A node with a receipt and a coordinator with a key, as their daemons leave them."""
    node, coordinator = home / "data/hypergpu/node", home / "data/hypergpu/coordinator"
    for path in (
        node / "identity.key",
        node / "tls.key",
        node / "blobs/one",
        node / "ledger/job/newest.json",
        node / "device-2/identity.key",
        node / "device-2/tls.key",
        node / "device-2/ledger/job/newest.json.damaged",
        node / "device-3/identity.key",
        node.with_name("node.passphrase"),
        node.with_name("node.worker") / "bin/python",
        coordinator / "identity/coordinator.key",
        coordinator / "journal.db",
        coordinator.with_name("coordinator.passphrase"),
        home / "config/hypergpu/up.toml",
        home / "cache/hypergpu/datasets/mnist",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return node, coordinator


def files_in(home: Path) -> set[str]:
    return {str(each.relative_to(home)) for each in home.rglob("*") if each.is_file()}


def test_uninstall_names_what_lies_where_and_keeps_keys_that_may_be_owed(
    alone: Hypergpu, tmp_path: Path
) -> None:
    make_places(tmp_path)
    result = alone("uninstall", "--yes")
    assert result.exit_code == 0, result.output
    assert f"{tmp_path}/data/hypergpu/node  " in result.stdout
    assert "identity.key, since what it earned or staked is paid to it alone" in result.stderr
    assert "the programs themselves: " in result.stdout
    assert files_in(tmp_path) == {
        "data/hypergpu/node/identity.key",
        "data/hypergpu/node/ledger/job/newest.json",
        "data/hypergpu/node/device-2/identity.key",
        "data/hypergpu/node/device-2/ledger/job/newest.json.damaged",
        "data/hypergpu/node/device-3/identity.key",
        "data/hypergpu/node.passphrase",
        "data/hypergpu/coordinator/identity/coordinator.key",
        "data/hypergpu/coordinator.passphrase",
    }


@pytest.mark.parametrize("is_linked", [False, True])
@pytest.mark.parametrize(
    ("node", "coordinator"), [("data/hypergpu", "data"), ("data", "data/hypergpu")]
)
def test_uninstall_keeps_a_key_whose_folder_lies_in_that_of_another_daemon(
    alone: Hypergpu,
    tmp_path: Path,
    node: str,
    coordinator: str,
    is_linked: bool,  # noqa: FBT001
) -> None:
    kept_names = {
        f"{node}/identity.key",
        f"{node}/ledger/job/newest.json",
        f"{node}.passphrase",
        f"{coordinator}/identity/coordinator.key",
        f"{coordinator}.passphrase",
    }
    for name in (*kept_names, f"{node}/tls.key", f"{coordinator}/journal.db"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to(tmp_path)
    home = tmp_path / "link" if is_linked else tmp_path
    folders = {
        "HYPERGPU_STATE_DIR": f"{home / node}",
        "HYPERGPU_DATA_DIR": str(tmp_path / coordinator),
    }
    result = alone("uninstall", "--yes", **folders)
    assert result.exit_code == 0, result.output
    assert files_in(tmp_path) == kept_names


def test_uninstall_asks_first(alone: Hypergpu, tmp_path: Path) -> None:
    make_places(tmp_path)
    before = files_in(tmp_path)
    assert alone("uninstall", "--dry-run").exit_code == 0
    assert "answer beforehand: --yes" in alone("uninstall").stderr
    assert files_in(tmp_path) == before


def test_uninstall_leaves_what_a_daemon_uses(alone: Hypergpu, tmp_path: Path) -> None:
    node, _ = make_places(tmp_path)
    with (node / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = alone("uninstall", "--yes")
    assert result.exit_code == Reason.STATE_LOCKED.exit_code
    assert "hypergpu leave" in result.stderr
    assert (node / "tls.key").exists()


def test_uninstall_leaves_what_a_daemon_uses_that_began_before_the_answer(
    environment: dict[str, str | None], tmp_path: Path
) -> None:
    node, _ = make_places(tmp_path)
    variables = {name: value for name, value in environment.items() if value is not None}
    terminal, stdin = os.openpty()
    with (
        subprocess.Popen(
            [sys.executable, "-m", "hypergpu.user.cli", "uninstall"],
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)} | variables,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as uninstall,
        (node / "lock").open("w") as lock,
    ):
        os.close(stdin)
        assert uninstall.stdout is not None
        output = b""
        while b"[y/N]" not in output and (more := uninstall.stdout.read(1)):
            output += more
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(terminal, b"y\n")
        assert b"hypergpu leave" in uninstall.stdout.read(), output
    os.close(terminal)
    assert uninstall.returncode == Reason.STATE_LOCKED.exit_code
    assert (node / "tls.key").exists()


def test_doctor_applies_what_needs_no_root_and_says_the_rest(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.touch(mode=0o644)
    checks = [
        Check("python", OK, "fine", command="false"),
        Check("state_dir", FAIL, "open", command=f"chmod go= {secret}"),
        Check("clock", WARN, "free", command="timedatectl set-ntp true", is_root=True),
        Check("disk", FAIL, "full", "free some"),
    ]
    assert list(mend(checks, is_root=False)) == [
        f"state_dir: chmod go= {secret}: done",
        "clock: as root: sudo sh -c 'timedatectl set-ntp true'",
    ]
    assert secret.stat().st_mode & 0o077 == 0
