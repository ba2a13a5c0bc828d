"""What other users of the machine and child processes do not get: folders, links, secrets, logs."""

import os
from pathlib import Path

import pytest

from hypergpu.durable import PRIVATE, SHARED, fill_durably, write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.part_file import make_part
from hypergpu.privacy import (
    LOG_BYTES_MAX,
    mending_command,
    public_environment,
    require_private_folder,
    rotate_log,
    variables_of,
)
from hypergpu.units import Bytes


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_folder_is_made_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        require_private_folder(tmp_path / "data")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "data") == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722, 0o702])
def test_a_folder_that_others_can_change_is_refused_with_the_command(
    mode: int, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(HyperGPUError, match="other users can change what is in") as failure:
        require_private_folder(folder)
    assert failure.value.reason is Reason.FOLDER_UNUSABLE
    assert failure.value.fix == f"chmod go-w {folder}"


def test_a_folder_within_is_refused_where_others_can_enter(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "identity").mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "identity").chmod(0o777)
    with pytest.raises(HyperGPUError, match=f"chmod go-w {folder}/identity"):
        require_private_folder(folder)
    folder.chmod(0o700)
    require_private_folder(folder)


@pytest.mark.parametrize(
    ("owner", "mode", "command"),
    [
        (1000, 0o755, ""),
        (0, 0o755, ""),
        (1000, 0o775, "chmod go-w"),
        (0, 0o777, "chmod go-w"),
        (1001, 0o700, "chown -R $(id -u)"),
    ],
)
def test_a_folder_belongs_to_its_user_or_root_alone(owner: int, mode: int, command: str) -> None:
    assert mending_command(owner, mode, user=1000) == command


def copy_to(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def test_no_link_is_followed_when_secrets_and_blobs_are_written(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"as it was")
    for name in ("secret", ".secret.new", ".blob.partial", "upload"):
        (tmp_path / name).symlink_to(victim)
    write_durably(tmp_path / "secret", b"a key")
    fill_durably(tmp_path / "blob", lambda path: copy_to(path, b"a blob"))
    with pytest.raises(OSError, match="symbolic link"):
        make_part(tmp_path / "upload", Bytes(10))
    assert victim.read_bytes() == b"as it was"
    assert not (tmp_path / "secret").is_symlink()
    assert not (tmp_path / "blob").is_symlink()
    assert mode_of(tmp_path / "secret") == 0o600


@pytest.mark.parametrize(("mode", "expected"), [(SHARED, 0o640), (PRIVATE, 0o600)])
def test_a_file_that_a_library_made_gets_the_permissions_that_are_wanted(
    mode: int, expected: int, tmp_path: Path
) -> None:
    """Whatever the library chose, as safetensors does, and within the user's umask."""

    def fill(path: Path) -> None:
        path.touch(0o606)
        path.write_bytes(b"weights")

    before = os.umask(0o027)
    try:
        fill_durably(tmp_path / "model", fill, mode=mode)
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "model") == expected


SECRETS = {
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_SHARED_CREDENTIALS_FILE": "x",
    "GITHUB_TOKEN": "x",
    "HF_TOKEN": "x",
    "HYPERGPU_CHAIN": "https://rpc.example/key",
    "HYPERGPU_COORDINATOR_CHAIN_URL": "https://rpc.example/key",
    "HYPERGPU_COORDINATOR_DATABASE_URL": "postgresql://user:secret@host",
    "HYPERGPU_COORDINATOR_EVENTS": "redis://:secret@host",
    "HYPERGPU_COORDINATOR_PASSPHRASE_FILE": "x",
    "HYPERGPU_JOIN_TOKEN": "x",
    "HYPERGPU_NODE_PASSPHRASE": "x",
    "PGPASSWORD": "x",
    "SSH_AUTH_SOCK": "x",
}
HARMLESS = {
    "CUDA_VISIBLE_DEVICES": "0",
    "HOME": "/root",
    "HYPERGPU_DATASETS": "/data",
    "HYPERGPU_NODE_WORKER_THREADS": "2",
    "https_proxy": "http://proxy",
    "PATH": "/bin",
}


def test_a_child_sees_no_variable_that_may_hold_a_secret() -> None:
    assert public_environment(SECRETS | HARMLESS) == HARMLESS


def test_a_child_sees_the_secrets_that_it_needs() -> None:
    assert variables_of("AWS_", "PG", environment=SECRETS | HARMLESS) == {
        name: "x" for name in SECRETS if name.startswith(("AWS_", "PG"))
    }


def test_a_log_is_set_aside_while_a_program_writes_it(tmp_path: Path) -> None:
    log = tmp_path / "coordinator.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"x" * LOG_BYTES_MAX)
        rotate_log(log)
        assert not log.with_suffix(".1").exists()
        writer.write(b"\n")
        rotate_log(log)
        writer.write(b"a new line\n")
    assert log.with_suffix(".1").stat().st_size == LOG_BYTES_MAX + 1
    assert log.read_bytes() == b"a new line\n"
