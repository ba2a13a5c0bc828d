"""From an empty environment to the first round of a model of one's own, as a person types it.

The wheels lie in uv's cache. The install is counted, the building of our wheel is not.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.table import PartFigures
from hypergpu.user.client import Coordinator
from hypergpu.user.client.connection import ConnectionTarget
from hypergpu.wire.credentials import parse_token

ROOT = Path(__file__).parents[3]
_JOIN = "hypergpu join "
_LOOK_UP_S = 0.1
_GIVE_UP_S = 900.0


class FirstJobSeconds(NamedTuple):
    """What the parts of the way took."""

    install_s: float
    """Environment and packages, from cached wheels."""
    round_s: float
    """From `hypergpu up` to the end of the first round."""


def pip_figures() -> PartFigures:
    """Measure it twice: the first run fills uv's cache and is not counted."""
    with tempfile.TemporaryDirectory(prefix="hypergpu-first-") as place:
        folder = Path(place)
        wheel = _build_wheel(folder)
        _install(folder / "warm", wheel)
        times = _measure(folder, wheel)
    total_s = times.install_s + times.round_s
    return PartFigures(
        rows=[
            [
                "first round of one's own model, from pip",
                f"installed before: {times.round_s:.1f} s",
                f"{total_s:.1f} s",
                f"{total_s / times.round_s:.2f}",
                f"the install: {times.install_s:.1f} s",
            ]
        ],
        metrics={
            "first_job_from_pip_s": total_s,
            "first_job_installed_s": times.round_s,
            "first_job_from_pip_over_installed": total_s / times.round_s,
        },
    )


def _build_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def _install(environment: Path, wheel: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    command = [sys.executable, str(ROOT / ".ci" / "install.py"), str(environment)]
    package = ["--package", f"hypergpu[torch] @ {wheel.as_uri()}"]
    lock = ["--constraint", str(ROOT / "locks" / "dev.txt")]
    subprocess.run([*command, *package, *lock], check=True)


def _measure(folder: Path, wheel: Path) -> FirstJobSeconds:
    started_s = time.monotonic()
    _install(folder / "fresh", wheel)
    installed_s = time.monotonic()
    home = folder / "home"
    home.mkdir()
    programs = folder / "fresh" / "bin"
    shutil.copy(ROOT / "examples" / "train_own_model.py", home)
    with ExitStack() as stack:
        free = [f"--{name}=0" for name in ("port", "node-port", "bulk-port")]
        up = [str(programs / "hypergpu"), "up", "--listen", "127.0.0.1", "--no-page", *free]
        lines = stack.enter_context(_program(up, home))
        token = next((line.split()[-1] for line in lines if line.strip().startswith(_JOIN)), "")
        if not token:
            raise BenchmarkError("hypergpu up printed no join line")
        join = [str(programs / "hypergpu"), "join", "--plain", token]
        stack.enter_context(_program(join, home))
        train = [str(programs / "python"), "train_own_model.py"]
        stack.enter_context(_program(train, home))
        _wait_for_round(home)
        return FirstJobSeconds(installed_s - started_s, time.monotonic() - installed_s)


@contextmanager
def _program(command: list[str], home: Path) -> Iterator[Iterator[str]]:
    """A command that runs beside the others; gives the lines of its output."""
    with (home / "errors.log").open("ab") as errors:
        child = subprocess.Popen(
            command,
            cwd=home,
            env={"HOME": str(home), "PATH": os.environ["PATH"]},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        yield iter(child.stdout.readline, "") if child.stdout else iter(())
    finally:
        # Killed, it would leave what it started.
        child.send_signal(signal.SIGINT)
        child.communicate()


def _wait_for_round(home: Path) -> None:
    token_file = home / ".local/share/hypergpu/coordinator/operator.token"
    token = parse_token(token_file.read_text("utf-8"))
    give_up_at_s = time.monotonic() + _GIVE_UP_S
    with Coordinator(ConnectionTarget(token.addresses[0], token, 60.0)) as client:
        while not any(job.round for job in client.jobs()):
            if time.monotonic() > give_up_at_s:
                raise BenchmarkError((home / "errors.log").read_text("utf-8")[-400:])
            time.sleep(_LOOK_UP_S)
