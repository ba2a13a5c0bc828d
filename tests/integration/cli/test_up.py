"""Starts of `hypergpu up` beside another one, after another one, and those that cannot succeed."""

import contextlib
import os
import socket
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import pytest

from hypergpu.errors import Reason
from hypergpu.wire.credentials import parse_token
from hypergpu.wire.free_ports import free_ports
from tests.integration.cli.conftest import JOIN, PROGRAM, Ended, end_and_wait, home, start
from tests.processes import Cluster, processes_left

WITH_PAGE = ["--listen", "127.0.0.1", "--port", "0", "--node-port", "0", "--bulk-port", "0"]
ANYWHERE = [*WITH_PAGE, "--no-page"]
"""The page's server is a process more for each start; one test has it."""


@contextlib.contextmanager
def up(folder: Path, *words: str, where: Sequence[str] = tuple(ANYWHERE)) -> Iterator[list[str]]:
    """A coordinator that runs while the block does; gives what it printed."""
    child = start(["up", *where, *words], folder)
    assert child.stdout is not None
    printed_lines = []
    for line in child.stdout:
        printed_lines.append(line.strip())
        if line.startswith("Ctrl-C"):
            break
    try:
        yield printed_lines
    finally:
        assert end_and_wait(child) == 0


def run_command(folder: Path, *words: str) -> Ended:
    return subprocess.run(
        [*PROGRAM, *words],
        capture_output=True,
        check=False,
        text=True,
        timeout=240,
        env=home(folder),
        cwd=folder,
    )


def join_line(said: list[str]) -> str:
    return next(line for line in said if line.startswith(JOIN)).removeprefix(JOIN)


def profile(folder: Path) -> dict[str, str]:
    return tomllib.loads((folder / "config" / "hypergpu" / "up.toml").read_text("utf-8"))


def test_up_prints_the_link_of_a_page_that_answers(tmp_path: Path) -> None:
    with up(tmp_path, "--page-port", "0", where=WITH_PAGE) as printed_lines:
        (link,) = [line for line in printed_lines if "#code=" in line]
        with urlopen(link.partition("#")[0] + "healthz", timeout=240) as answer:  # noqa: S310
            assert answer.status == 200


def test_no_coordinator_outlives_an_up_that_nobody_reads(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = [*PROGRAM, "up", *ANYWHERE]
    subprocess.run(
        words,
        check=False,
        stdout=write_end,
        stderr=write_end,
        timeout=240,
        env=home(tmp_path),
        cwd=tmp_path,
    )
    os.close(write_end)
    assert processes_left(tmp_path) == []


def test_second_coordinator_leaves_the_profile_to_the_one_that_runs(tmp_path: Path) -> None:
    with up(tmp_path):
        first = profile(tmp_path)
        with up(tmp_path, "--data-dir", str(tmp_path / "second")) as printed_lines:
            token_file = tmp_path / "second" / "operator.token"
            assert profile(tmp_path) == first
            assert any(
                line.endswith(f"for this one add --token-file {token_file}")
                for line in printed_lines
            )
            there = run_command(tmp_path, "node", "ls", "--token-file", str(token_file))
            assert there.returncode == 0, there.stderr
    with up(tmp_path, "--data-dir", str(tmp_path / "second")):
        assert profile(tmp_path)["token_file"] == str(token_file)


def test_join_line_is_told_again_until_another_number_may_join_or_it_is_revoked(
    tmp_path: Path,
) -> None:
    lines, counts = [], []
    for words, number in (((), "8 nodes"), (("--nodes", "3"), "3 nodes"), ((), "3 nodes")):
        with up(tmp_path, *words) as printed_lines:
            assert any(f"(good for {number} and " in line for line in printed_lines)
            lines.append(parse_token(join_line(printed_lines)))
            counts.append(run_command(tmp_path, "token", "ls").stdout.count(" up "))
            line_file = tmp_path / "data" / "hypergpu" / "coordinator" / "join.token"
            assert line_file.stat().st_mode & 0o777 == 0o600
            if len(lines) == 3:
                assert run_command(tmp_path, "token", "revoke", lines[2].id[:6]).returncode == 0
    first, second, third = lines
    assert first.id != second.id
    assert second.secret == third.secret
    assert counts[1] == counts[2]
    with up(tmp_path) as printed_lines:
        assert parse_token(join_line(printed_lines)).id not in {each.id for each in lines}


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (["--data-dir", "/proc/none"], 16, "error 6003: nothing can be kept in /proc/none: "),
        (["--port", "70000"], 2, "error 6002: Invalid value for '--port': Input should be less"),
        (["--advertise", "bad host:99"], 15, "error 5007: --advertise 'bad host:99' is no host."),
    ],
)
def test_start_that_cannot_succeed_ends_in_one_line(
    words: list[str], status: int, line: str, tmp_path: Path
) -> None:
    process = run_command(tmp_path, "up", *ANYWHERE, *words)
    assert process.returncode == status, process.stderr
    assert process.stderr.startswith(line)
    assert process.stderr.count("\n") == 1
    assert process.stdout == ""
    assert not (tmp_path / "data").exists() or not any((tmp_path / "data" / "hypergpu").iterdir())


def test_taken_port_is_one_line_and_leaves_no_folder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        folder = tmp_path / "kept"
        words = ["--port", str(port), "--data-dir", str(folder)]
        process = run_command(tmp_path, "up", *ANYWHERE, *words)
    assert process.returncode == Reason.ADDRESS_UNUSABLE.exit_code
    assert process.stderr.startswith(f"error 5007: 127.0.0.1:{port} cannot be bound. Fix: ")
    assert process.stderr.count("\n") == 1
    assert not folder.exists()


class RunningUp(NamedTuple):
    """A coordinator that tests share."""

    folder: Path
    node_port: int


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    folder, (port,) = tmp_path_factory.mktemp("running"), free_ports(1)
    with up(folder, "--node-port", str(port)):
        yield RunningUp(folder, port)


def test_folder_in_use_is_one_line_and_stays(running: RunningUp) -> None:
    process = run_command(running.folder, "up", *ANYWHERE)
    assert run_command(running.folder, "node", "ls").returncode == 0
    assert process.returncode == Reason.FOLDER_UNUSABLE.exit_code
    assert process.stderr.startswith("error 5008: the journal ")
    assert "is in use by a coordinator (process " in process.stderr
    assert process.stderr.count("\n") == 1
    assert process.stdout == ""


def test_uninstall_leaves_a_coordinator_whose_journal_lies_elsewhere(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--database-url", f"sqlite:///{tmp_path / 'journal'}") as cluster:
        places = {**home(tmp_path), "HYPERGPU_DATA_DIR": str(cluster.coordinator.data_dir)}
        command = [*PROGRAM, "uninstall", "--yes"]
        process = subprocess.run(command, check=False, capture_output=True, text=True, env=places)
    assert process.returncode == Reason.STATE_LOCKED.exit_code, process.stderr
    assert "Ctrl-C a coordinator" in process.stderr


def test_node_port_is_told_from_the_main_one(running: RunningUp) -> None:
    port = running.node_port
    process = run_command(running.folder, "node", "ls", "--address", f"127.0.0.1:{port}")
    assert process.returncode == Reason.COORDINATOR_UNREACHABLE.exit_code
    assert process.stderr == (
        f"error 5005: 127.0.0.1:{port} is that coordinator's port for nodes."
        " Fix: name its main port, 7700 unless it was told another\n"
    )


def test_other_coordinator_at_the_address_is_recognised(running: RunningUp) -> None:
    # The first call keeps the CA: the second one dials without asking for it again.
    assert run_command(running.folder, "node", "ls").returncode == 0
    second = running.folder / "second"
    with up(running.folder, "--data-dir", str(second)):
        token = parse_token((second / "operator.token").read_text("utf-8"))
        process = run_command(running.folder, "node", "ls", "--address", token.addresses[0])
    assert process.returncode == Reason.AUTHORITY_MISMATCH.exit_code, process.stderr
    assert process.stderr.startswith("error 1106: ")
    assert process.stderr.count("\n") == 1
