"""What holds for every test: its folder is its marker, and nothing of ours unpickles."""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from hypergpu.user.cluster.s3_server import S3Server
from tests.programs import NEEDS, install_command, missing_needs
from tests.warm_workers import WarmWorkers, is_wanted

TESTS = Path(__file__).parent
TEST_TOOLS = ("_pytest", "hypothesis", "pluggy", "pytest", "pytest_asyncio", "pytest_timeout")

# Tests run side by side: a second thread of a library mostly waits, and busily. Read as numpy and
# torch are loaded, here and in what tests start.
for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

# Tables in a pipe would obey the width of whoever runs the tests.
os.environ.pop("COLUMNS", None)

# Started in the background, tests and their children would ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `make test-gpu` and `make wheel` name these folders.
collect_ignore = ["gpu", "wheel"]

settings.register_profile("hypergpu", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("hypergpu")

unpickled: list[str] = []
left_out: dict[str, list[str]] = {}
"""Tests that cannot run here, by what they lack."""


def refuse_unpickling(event: str, arguments: tuple[object, ...]) -> None:
    """Audit hook: a class looked up by an unpickler fails the run, test tools aside."""
    if event != "pickle.find_class":
        return
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__") in {"pickle", "_pickle"}:
        frame = frame.f_back
    caller = str(frame.f_globals.get("__name__", ""))
    if caller.partition(".")[0] in TEST_TOOLS:
        return
    unpickled.append(f"{caller} unpickled {'.'.join(map(str, arguments))}")
    raise RuntimeError(f"{unpickled[-1]}. Fix: no pickle in any form")


sys.addaudithook(refuse_unpickling)


warm_workers: list[WarmWorkers] = []
"""The server of forks that the process which starts the others has; none: it has none."""


def pytest_configure(config: pytest.Config) -> None:
    """Name the server of forks before any process of the run is started."""
    if not hasattr(config, "workerinput") and is_wanted():
        warm_workers.append(WarmWorkers())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server where the tests of a single process need it."""
    for each in warm_workers:
        each.start_for(item.nodeid for item in session.items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    """Start the server where tests of one of several processes need it."""
    for each in warm_workers:
        each.start_for(ids)


def pytest_unconfigure() -> None:
    """End the server."""
    while warm_workers:
        warm_workers.pop().close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Give each of several processes the tests of whole files."""
    if config.getvalue("dist") != "loadfile":
        return None
    # Imported here: tests of a GPU run where there is no xdist.
    from tests.file_scheduling import FileScheduling

    return FileScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what collecting makes, millions of objects that stay, out of garbage collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _default_logs() -> Iterator[None]:
    """A command sets logs up for its process, which here runs other tests, too."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with the first folder below ``tests``; leave out what lacks its programs."""
    absent = missing_needs()
    runnable: list[pytest.Item] = []
    unrunnable: list[pytest.Item] = []
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        item.add_marker(getattr(pytest.mark, folder))
        needs = [name for mark in item.iter_markers("needs") for name in mark.args]
        missing_programs = [name for name in needs if name in absent]
        (unrunnable if missing_programs else runnable).append(item)
        # One that `-m` leaves out anyway is missing nowhere.
        if missing_programs and not (item.get_closest_marker("full") and config.option.markexpr):
            left_out.setdefault(missing_programs[0], []).append(item.nodeid)
    config.hook.pytest_deselected(items=unrunnable)
    items[:] = runnable


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run even where somebody caught the hook's error, and in CI where a test is missing;
    a worker tells who started it.
    """
    # Libraries complain about what the interpreter cannot collect at its end.
    gc.unfreeze()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput |= {"unpickled": unpickled, "left_out": left_out}
    elif unpickled or (left_out and os.environ.get("CI")):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_testnodedown(node: object) -> None:
    """What one of several workers saw counts as seen here."""
    output = getattr(node, "workeroutput", {})
    unpickled.extend(output.get("unpickled", []))
    # Each worker collects all tests.
    left_out.update(output.get("left_out", {}))


def left_out_lines() -> Iterator[str]:
    """What did not run, by the program that it lacks, each with the way to get it."""
    for name, tests in sorted(left_out.items()):
        program = NEEDS[name]
        fix = program.fix or install_command(program.packages, is_root=os.geteuid() == 0)
        files = ", ".join(sorted({each.partition("::")[0] for each in tests}))
        yield f"{len(tests)} did not run, without {name}: {files}. Fix: {fix}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what tests measured, under the property `said`, and name who unpickled what."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    for report in reports:
        for name, line in report.user_properties:
            if name == "said":
                terminalreporter.write_line(line)
    for line in left_out_lines():
        terminalreporter.write_line(line, yellow=True)
    for line in unpickled:
        terminalreporter.write_line(f"FAILED: {line}", red=True)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("buckets")) as server:
        yield server
