"""The build of an earlier commit, called as a command beside this one over the same lines.

It lies under ``build``, in a worktree of git with an environment from its own locks, made once. Its
reports are JSON; nothing of it is imported here.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.ours.awareness.runs import DIGITS, GRADES, ROOT, TRIES, LateError, NotReachedError
from benchmarks.ours.cluster import BenchmarkError

BEFORE = "60a0ebb9"
"""Commit that is measured against: the last one before rounds in one round trip and Muon."""
WORKTREE = ROOT / "build" / f"before-{BEFORE}"
_LIMIT_S = 3600
_SET_UP_LIMIT_S = 1800
# As this build's runs: workers and evaluators are forks of a process that has torch loaded.
_WARM = (
    "import subprocess, sys\n"
    "from benchmarks.ours.warm import warm_starts\n"
    "with warm_starts():\n"
    "    sys.exit(subprocess.run(sys.argv[1:]).returncode)\n"
)


class _Target(msgspec.Struct, frozen=True):
    at_ms: int


class _Verdict(msgspec.Struct, frozen=True):
    is_valid: bool
    sentence: str


class EarlierReport(msgspec.Struct, frozen=True, kw_only=True):
    """What both builds' reports of a run have in common, as far as it is read here."""

    phase: str
    reason: str
    verdict: _Verdict
    to_target: _Target | None = None


class EarlierRun(NamedTuple):
    """A run of the earlier build."""

    grade: str
    seed: int
    job: Path = DIGITS

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"before-{self.seed}-{self.grade}"


def require_worktree() -> Path:
    """Make the worktree and its environment where they are not there yet.

    The first time it takes about a minute and downloads what its locks name.

    Raises:
        BenchmarkError: The history does not reach back to the commit, or the setup failed.
    """
    require_commit(ROOT)
    if not (WORKTREE / "Makefile").exists():
        _git("worktree", "prune")
        addition = _git("worktree", "add", "--force", "--detach", str(WORKTREE), BEFORE)
        _require_success(addition, "git worktree add")
    head = _git("rev-parse", "HEAD", folder=WORKTREE).stdout.decode().strip()
    if not head.startswith(BEFORE):
        raise BenchmarkError(f"{WORKTREE} is at {head}. Fix: remove it")
    sys.stderr.write(f"before: {WORKTREE.relative_to(ROOT)} is set up\n")
    _require_success(_run(["make", "setup"], WORKTREE, _SET_UP_LIMIT_S), "make setup there")
    return WORKTREE


def require_commit(clone: Path) -> None:
    """Reject a clone that lacks the commit.

    Raises:
        BenchmarkError: With the fix.
    """
    if _git("cat-file", "-e", f"{BEFORE}^{{commit}}", folder=clone).returncode:
        raise BenchmarkError(
            f"commit {BEFORE} is not in this clone, whose history is too short."
            " Fix: git fetch --unshallow"
        )


def earlier_seconds(run: EarlierRun, folder: Path) -> float:
    """Time to the target, counted from the opening of the first round.

    Args:
        run: What is run; its links are the tunnel's.
        folder: Gets its logs.

    Raises:
        LateError: The links were not as asked, the second time either.
        NotReachedError: It ended before it was at the target.
        BenchmarkError: It did not end as a run ends.
    """
    report = _report(run, folder)
    for _ in range(TRIES - 1):
        if report.verdict.is_valid:
            break
        report = _report(run, folder)
    if not report.verdict.is_valid:
        raise LateError(f"{run.name}: {report.verdict.sentence}")
    if report.to_target is None:
        raise NotReachedError(f"{run.name} never reached its target: {report.reason}")
    return report.to_target.at_ms / 1000


def _report(run: EarlierRun, folder: Path) -> EarlierReport:
    out = folder / run.name
    shutil.rmtree(out, ignore_errors=True)
    python = str(WORKTREE / ".venv" / "bin" / "python")
    words = ["run", str(GRADES / f"{run.grade}.toml"), "--job", str(run.job)]
    words += ["--strategy", "aware", "--seed", str(run.seed), "--backend", "tunnel"]
    words += ["--give-up-after", str(_LIMIT_S), "--out", str(out), "--json"]
    sys.stderr.write(f"{run.name}: ")
    sys.stderr.flush()
    command = [python, "-c", _WARM, python, "-m", "netsim", *words]
    ran = _run(command, WORKTREE, _LIMIT_S + 600)
    if not ran.stdout.strip():
        sys.stderr.write("failed\n")
        _require_success(ran, run.name)
        raise BenchmarkError(f"{run.name} ended without a report")
    report = msgspec.json.decode(ran.stdout, type=EarlierReport)
    there = "not reached" if report.to_target is None else f"{report.to_target.at_ms / 1000:.1f} s"
    sys.stderr.write(f"target {there}{'' if report.verdict.is_valid else ' (INVALID)'}\n")
    return report


def _git(*words: str, folder: Path = ROOT) -> "subprocess.CompletedProcess[bytes]":
    return _run(["git", *words], folder, _SET_UP_LIMIT_S)


def _run(
    command: Sequence[str], folder: Path, limit_s: float
) -> "subprocess.CompletedProcess[bytes]":
    """Run a command of the earlier build, without what this build's make and Python set."""
    ours = ("MAKE", "MFLAGS", "HYPERGPU_", "VIRTUAL_ENV", "PYTHON")
    environment = {key: each for key, each in os.environ.items() if not key.startswith(ours)}
    try:
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{command[0]} did not end within {limit_s:g} s") from None


def _require_success(ran: "subprocess.CompletedProcess[bytes]", what: str) -> None:
    if ran.returncode:
        log_end = (ran.stderr or ran.stdout)[-2000:].decode(errors="replace")
        raise BenchmarkError(f"{what} failed: {log_end}")
