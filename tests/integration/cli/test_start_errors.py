"""Starts on folders, disks and outputs that take nothing: one sentence with the fix each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hypergpu.errors import Reason
from hypergpu.ids import Digest, TokenId
from hypergpu.wire.credentials import Role, Token, token_text
from tests.integration.cli.conftest import PROGRAM, Ended, home

ANYWHERE = [
    "--plaintext",
    "--listen",
    "127.0.0.1",
    "--port",
    "0",
    "--node-port",
    "0",
    "--bulk-port",
    "0",
]
PROGRAMS = {
    "coordinator": [sys.executable, "-m", "coordinator", *ANYWHERE],
    "up": [*PROGRAM, "up", *ANYWHERE],
}
# Root writes into any folder, unless it gives up this.
OBEYING = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
IS_ROOT = os.geteuid() == 0
CAN_MOUNT = IS_ROOT and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0


@pytest.fixture(params=list(PROGRAMS.values()), ids=list(PROGRAMS))
def program(request: pytest.FixtureRequest) -> list[str]:
    words: list[str] = request.param
    return words


def run_to_end(command: list[str], folder: Path, **environment: str) -> Ended:
    variables = {**home(folder), **environment}
    return subprocess.run(
        command, capture_output=True, check=False, text=True, timeout=120, cwd=folder, env=variables
    )


def assert_one_sentence(ended: Ended, reason: Reason, *words: str) -> None:
    assert ended.returncode == reason.exit_code, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert str(reason.number) in line
    assert "Fix: " in line
    assert all(word in line for word in words), line


def read_only(folder: Path) -> Path:
    folder.mkdir()
    folder.chmod(0o555)
    return folder


def obeying(command: list[str]) -> list[str]:
    """The command as somebody whom permissions bind."""
    return [*OBEYING, *command] if IS_ROOT else command


def on_small_disk(command: list[str], folder: Path, kib: int) -> list[str]:
    """The command, with ``folder`` a disk of this size, or else with files of at most that size."""
    if not CAN_MOUNT:
        return ["prlimit", f"--fsize={kib * 1024}", *command]
    folder.mkdir()
    script = f'mount -t tmpfs -o size={kib}k none "$0" && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, str(folder), *command]


def test_read_only_folder_is_named(program: list[str], tmp_path: Path) -> None:
    folder = read_only(tmp_path / "closed")
    process = run_to_end(obeying([*program, "--data-dir", str(folder / "made")]), tmp_path)
    assert_one_sentence(process, Reason.FILE_UNUSABLE, str(folder), "denied", "--data-dir")


def test_data_folder_of_others_is_named(tmp_path: Path) -> None:
    folder = read_only(tmp_path / "closed")
    command = obeying([*PROGRAMS["coordinator"], "--data-dir", str(folder)])
    process = run_to_end(command, tmp_path)
    assert_one_sentence(process, Reason.FOLDER_UNUSABLE, str(folder), "denied", "--data-dir")


@pytest.mark.parametrize("kib", [16, 220])
def test_full_disk_is_named(program: list[str], kib: int, tmp_path: Path) -> None:
    """The journal does not fit on the small disk; on the larger one, what comes after it."""
    disk = tmp_path / "disk"
    limit = kib if CAN_MOUNT else 16
    command = on_small_disk([*program, "--data-dir", str(disk / "data")], disk, limit)
    assert_one_sentence(run_to_end(command, tmp_path), Reason.DISK_FULL, "free disk space")


@pytest.mark.parametrize("kib", [4, 12])
def test_a_node_names_the_folder_of_its_full_disk(kib: int, tmp_path: Path) -> None:
    """Its name does not fit, or its key."""
    disk, token_file = tmp_path / "disk", tmp_path / "token"
    token = Token(("127.0.0.1:9",), Digest("a" * 64), Role.NODE, TokenId("0" * 12), "s" * 43)
    token_file.write_text(token_text(token))
    node = [sys.executable, "-m", "gpu_node", "join", "--token-file", str(token_file)]
    command = on_small_disk([*node, "--state-dir", str(disk / "node")], disk, kib)
    process = run_to_end(command, tmp_path, HYPERGPU_NODE_NAME="x")
    assert process.returncode == Reason.DISK_FULL.exit_code, process.stderr
    error, fix = process.stderr.splitlines()[-2:]
    assert str(disk) in error
    assert "1 MB" in fix
    assert "--state-dir" in fix


def test_home_that_takes_nothing_is_named(program: list[str], tmp_path: Path) -> None:
    closed_folder = str(read_only(tmp_path / "closed"))
    places = {
        "HOME": closed_folder,
        "XDG_DATA_HOME": "",
        "XDG_CONFIG_HOME": "",
        "XDG_STATE_HOME": "",
    }
    process = run_to_end(obeying(program), tmp_path, **places)
    assert_one_sentence(process, Reason.FILE_UNUSABLE, closed_folder, "--data-dir")


def test_up_serves_without_a_profile_and_says_how_it_is_reached(tmp_path: Path) -> None:
    closed_folder = str(read_only(tmp_path / "closed"))
    command = obeying([*PROGRAMS["up"], "--data-dir", str(tmp_path / "data")])
    places = {**home(tmp_path), "HOME": closed_folder, "XDG_CONFIG_HOME": ""}
    with subprocess.Popen(
        command, cwd=tmp_path, env=places, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout
        lines = list(iter(child.stdout.readline, "Ctrl-C ends it and keeps everything\n"))
        child.terminate()
    text = "".join(lines)
    assert f"{closed_folder}/.config cannot be written" in text
    assert f"Fix: add --token-file {tmp_path}/data/operator.token" in text


@pytest.mark.parametrize("output", ["> /dev/full", ">&-", ">&- <&-"])
def test_output_that_takes_nothing_is_named(
    program: list[str], output: str, tmp_path: Path
) -> None:
    command = [*program, "--data-dir", str(tmp_path / "data")]
    process = run_to_end(["sh", "-c", f'exec "$0" "$@" {output}', *command], tmp_path)
    assert_one_sentence(process, Reason.FILE_UNUSABLE, "standard output", "/dev/null")


def test_nothing_of_ours_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    command = ["sh", "-c", 'exec "$0" "$@" >&- 2>&- <&-', *PROGRAM, "--version"]
    process = run_to_end(command, tmp_path)
    assert (process.returncode, process.stdout, process.stderr) == (16, "", "")
