"""A process's log and standard error, where what they are written to takes nothing."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hypergpu.process import LOG_BYTES_MAX, LOG_FILES_BEFORE

LOGS = """
import resource, sys
from pathlib import Path
import structlog
from hypergpu.process import configure_logs
configure_logs("info", Path(sys.argv[1]))
limit = int(sys.argv[3])
if limit:
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for number in range(int(sys.argv[2])):
    structlog.get_logger().info("x" * 50_000, number=number)
"""


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", LOGS, *words]
    return subprocess.run(command, capture_output=True, check=True, text=True)


def test_a_log_is_rotated_and_its_oldest_lines_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "node.log"
    count = (LOG_FILES_BEFORE + 3) * LOG_BYTES_MAX // 50_000
    process = run(str(file), str(count), "0")
    assert (process.stdout, process.stderr) == ("", "")
    kept_files = sorted(tmp_path.iterdir())
    assert [path.name for path in kept_files] == [
        "node.log",
        *(f"node.log.{number}" for number in range(1, LOG_FILES_BEFORE + 1)),
    ]
    assert all(path.stat().st_size <= LOG_BYTES_MAX for path in kept_files)
    assert f'"number": {count - 1}' in file.read_text("utf-8")


def test_a_disk_that_takes_no_line_of_a_log_ends_nothing(tmp_path: Path) -> None:
    process = run(str(tmp_path / "node.log"), "3", "60000")
    assert (process.stdout, process.stderr) == ("", "")


SAYS = """
import sys
from hypergpu.stdio import prepare_streams
prepare_streams()
for _ in range(2):
    sys.stderr.write("a line\\n")
sys.stdout.write("still here")
"""


def broken_pipe() -> int:
    read_end, write_end = os.pipe()
    os.close(read_end)
    return write_end


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("open_sink", [broken_pipe, full_disk])
def test_standard_error_that_takes_nothing_ends_no_program(open_sink: Callable[[], int]) -> None:
    sink = open_sink()
    try:
        command = [sys.executable, "-c", SAYS]
        process = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=sink, check=True, text=True
        )
    finally:
        os.close(sink)
    assert process.stdout == "still here"


def test_a_process_that_may_open_too_few_files_says_how_many_it_needs() -> None:
    program = "from hypergpu.process import require_descriptors as need; need(400)"
    command = ["sh", "-c", f"ulimit -n 300; exec {sys.executable} -c '{program}'"]
    answer = subprocess.run(command, check=False, capture_output=True, text=True)
    assert "300 files, and it needs 400. Fix: run `ulimit -n 400`" in answer.stderr
