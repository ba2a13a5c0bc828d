"""Runs of netsim, one after the other; what is finished is kept and not run again."""

import re
import signal
import sys
from pathlib import Path
from shutil import rmtree
from subprocess import Popen, TimeoutExpired
from typing import NamedTuple

import msgspec

from hypergpu.cli.compare.order import Errand
from hypergpu.cli.compare.outcome import Report
from hypergpu.cluster.leash import leash_command
from hypergpu.cluster.processes import kill_group, program, start
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason, RemoteFailureError
from hypergpu.ids import Digest

END_WITHIN_S = 60.0
_ERROR = re.compile(r"^(?:\x1b\[\d+m)?error (\d+): (.*?)\.? Fix: (.*?)(?:\x1b\[0m)?$")
_STATE = "state"
"""What a run leaves beside its logs: the models of a job that nobody will go on with."""


class RunProspect(msgspec.Struct, frozen=True):
    """Fields that are used of `netsim run --dry-run --json`."""

    world: str
    nodes: int
    workload: str
    target: float
    metric_name: str
    inputs: str


class KeptReport(msgspec.Struct, frozen=True):
    """A finished run on disk."""

    key: str
    """Digest of what decides it."""
    report: Report


class RunPlace(NamedTuple):
    """Where one run keeps its things."""

    folder: Path

    @property
    def report(self) -> Path:
        """What it came to."""
        return self.folder / "report.json"

    @property
    def errors(self) -> Path:
        """What it wrote to stderr."""
        return self.folder / "netsim.err"


def prospect(errand: Errand, folder: Path) -> RunProspect:
    """What a run would be, without running it.

    Raises:
        RemoteFailureError: netsim refuses it, and says why.
    """
    place = RunPlace(folder / errand.name)
    try:
        text = _output(errand, ["--dry-run"], place)
    except RemoteFailureError as refused:
        # What is refused before anything is run is no single run's fault.
        what = refused.detail.removeprefix(f"{errand.name}: ")
        raise RemoteFailureError(number=refused.number, detail=what, fix=refused.fix) from refused
    return msgspec.json.decode(text, type=RunProspect)


def key_of(errand: Errand, seen: RunProspect) -> Digest:
    """Names a run's inputs, out of what was seen of the same run by another seed."""
    return digest_of(f"{seen.inputs} {errand.seed}".encode())


def kept_report(errand: Errand, key: Digest, folder: Path) -> Report | None:
    """The report of an earlier run with the same inputs; None when there is none."""
    try:
        found = msgspec.json.decode(
            RunPlace(folder / errand.name).report.read_bytes(), type=KeptReport
        )
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return None
    return found.report if found.key == key else None


def ran(errand: Errand, key: Digest, folder: Path) -> Report:
    """Run it and keep what it came to.

    Raises:
        RemoteFailureError: netsim refused it or gave up.
        HyperGPUError: CHILD_ENDED, it ended without saying why.
    """
    place = RunPlace(folder / errand.name)
    place.report.unlink(missing_ok=True)
    report = msgspec.json.decode(_output(errand, [], place), type=Report)
    rmtree(place.folder / _STATE, ignore_errors=True)
    partial = place.report.with_suffix(".part")
    partial.write_bytes(msgspec.json.encode(KeptReport(key, report)))
    partial.replace(place.report)
    return report


def _output(errand: Errand, more: list[str], place: RunPlace) -> str:
    place.folder.mkdir(parents=True, exist_ok=True)
    place.errors.write_bytes(b"")
    words = ["run", *errand.words, "--out", str(place.folder), "--json", *more]
    child = start(leash_command(program("netsim", *words)), log=place.errors, is_read=True)
    try:
        text = child.stdout.read() if child.stdout else ""
        status = child.wait()
    except BaseException:
        _end(child)
        raise
    finally:
        if child.stdout:
            child.stdout.close()
    # A job that missed its end, and links that were not as asked, are a status of 1 and a report.
    if not text.strip():
        raise _failure(errand, status, place)
    return text


def _end(child: "Popen[str]") -> None:
    """Let it take its links and programs down."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    try:
        child.wait(END_WITHIN_S)
    except TimeoutExpired:
        kill_group(child)


def _failure(errand: Errand, status: int, place: RunPlace) -> Exception:
    lines = place.errors.read_text("utf-8", "replace").splitlines()
    for line in reversed(lines):
        if found := _ERROR.match(line):
            what = f"{errand.name}: {found[2]}"
            return RemoteFailureError(number=int(found[1]), detail=what, fix=found[3])
    detail = f"{errand.name} ended with status {status} and without a report"
    return HyperGPUError(Reason.CHILD_ENDED, detail, fix=f"read {place.errors}")


def interrupt_on_term() -> None:
    """Let SIGTERM end this program as Ctrl-C does, with everything that it started."""

    def leave(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)


def say_piece(text: str) -> None:
    """A part of a line for the person, at once visible."""
    sys.stderr.write(text)
    sys.stderr.flush()
