"""Runs jobs on all cores and keeps what they gave, so that a long run goes on where it stopped."""

import itertools
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.trust.outcome import Outcome, Setting
from benchmarks.peers.seconds import ROOT, python_of

KEPT = ROOT / "build" / "trust"
_SAID_EVERY = 20
_SOURCES = (
    *(
        f"benchmarks/ours/trust/{name}.py"
        for name in (
            "attacks",
            "backdoor_defences",
            "defended_rounds",
            "outcome",
            "runs",
            "sent_updates",
            "simulated",
            "training",
        )
    ),
    *(
        f"coordinator/core/training/trust/{name}.py"
        for name in (
            "honesty",
            "noise",
            "own_draw",
            "own_evidence",
            "own_samples",
            "pay_share",
            "weights",
        )
    ),
    "coordinator/shell/aggregation",
)
"""What outcomes depend on: with other sources, kept ones are not used."""


class _Kept(msgspec.Struct, frozen=True):
    setting: Setting
    outcome: Outcome


class Store:
    """Outcomes on disk, of the present sources."""

    def __init__(self, folder: Path = KEPT) -> None:
        """Read what is there."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{_sources_digest()}.jsonl"
        self.outcomes: dict[Setting, Outcome] = {}
        if self._path.exists():
            for line in self._path.read_bytes().splitlines():
                row = msgspec.json.decode(line, type=_Kept)
                self.outcomes[row.setting] = row.outcome

    def keep(self, setting: Setting, outcome: Outcome) -> None:
        """Add one."""
        self.outcomes[setting] = outcome
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(_Kept(setting, outcome)) + b"\n")


def run_settings(settings: Iterable[Setting]) -> Mapping[Setting, Outcome]:
    """Outcomes of all settings, in the order of need; those that are kept are not run again.

    Raises:
        BenchmarkError: A process that runs them failed.
    """
    store = Store()
    setting_list = list(dict.fromkeys(settings))
    missing_settings = [each for each in setting_list if each not in store.outcomes]
    if missing_settings:
        _say(
            f"{len(setting_list) - len(missing_settings)} jobs are kept,"
            f" {len(missing_settings)} to run"
        )
        _run_missing(missing_settings, store)
    return {setting: store.outcomes[setting] for setting in setting_list}


def _run_missing(missing: Sequence[Setting], store: Store) -> None:
    waiting_settings: queue.SimpleQueue[Setting | None] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[Setting, Outcome] | str] = queue.SimpleQueue()
    count = min(len(missing), os.cpu_count() or 1)
    for setting in (*missing, *itertools.repeat(None, count)):
        waiting_settings.put(setting)
    python = python_of("byzfl")
    threads = [
        threading.Thread(target=_work, args=(python, waiting_settings, answers), daemon=True)
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for done_count in range(1, len(missing) + 1):
        answer = answers.get()
        if isinstance(answer, str):
            raise BenchmarkError(answer)
        store.keep(*answer)
        if done_count % _SAID_EVERY == 0 or done_count == len(missing):
            _say(f"{done_count} of {len(missing)} jobs, {answer[0]}")
    for thread in threads:
        thread.join()


def _work(
    python: Path,
    left: "queue.SimpleQueue[Setting | None]",
    answers: "queue.SimpleQueue[tuple[Setting, Outcome] | str]",
) -> None:
    """Feed one process until nothing is left."""
    with subprocess.Popen(
        [str(python), "-m", "benchmarks.ours.trust.runs"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise AssertionError("both are pipes")
        while (setting := left.get()) is not None:
            process.stdin.write(msgspec.json.encode(setting) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                answers.put(f"the process that ran {setting} ended")
                return
            answers.put((setting, msgspec.json.decode(line, type=Outcome)))
        process.stdin.close()


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _sources_digest() -> str:
    hasher = blake3()
    for source in _SOURCES:
        path = ROOT / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            hasher.update(file.read_bytes())
    return hasher.hexdigest(8)
