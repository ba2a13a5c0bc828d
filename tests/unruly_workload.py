"""A workload, as another package may bring one, that does what a worker must not, or breaks down.

Its option `deed` says what. The outcome of the deeds of `try_everything` is the reason of its
failure.
"""

import ctypes
import os
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hypergpu.workloads.datasets import Array, DatasetError
from hypergpu.workloads.digits import DigitsSoftmax
from hypergpu.workloads.entry import Option, Options, WorkloadEntry
from hypergpu.workloads.workload import Parameters

NAME = "unruly"
ENTRY = WorkloadEntry(
    name=NAME,
    kind="numpy",
    dataset="digits",
    meaning="Digits, until it breaks down",
    builder=f"{__name__}:build",
    options=(Option("deed", "none", "What it does"), Option("path", "/", "The node's folder")),
)


class Unruly(DigitsSoftmax):
    """Digits whose gradient is a fault."""

    def __init__(self, deed: Callable[[], None]) -> None:
        self._deed = deed

    def gradient(
        self, parameters: Parameters, inputs: Array, targets: Array
    ) -> tuple[float, dict[str, NDArray[np.float32]]]:
        """The digits' own gradient, after the deed; its loss is NaN after `spoil`."""
        self._deed()
        loss, gradients = super().gradient(parameters, inputs, targets)
        return (float("nan") if self._deed is spoil else loss), gradients


def build(options: Options) -> Unruly:
    """Builder of the entry."""
    deed = str(options["deed"])
    if deed == "escape":
        raise DatasetError(try_everything(Path(str(options["path"]))))
    return Unruly(DEEDS[deed])


def crash() -> None:
    """Read address zero."""
    ctypes.string_at(0)


def devour() -> None:
    """Take a gigabyte of memory more each time, and use it."""
    HELD.append(np.ones(1 << 27))


def miss() -> None:
    """Look for what is not there."""
    HELD[-1 - len(HELD)]


def hold_lock() -> None:
    """Hold the interpreter's lock for hours: no other thread of this process runs meanwhile."""
    re.match("(a+)+$", "a" * 60 + "b")


def spoil() -> None:
    """See `Unruly.gradient`."""


HELD: list[np.ndarray] = []
DEEDS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "crash": crash,
    "devour": devour,
    "hold_lock": hold_lock,
    "miss": miss,
    "spoil": spoil,
}


def try_everything(node: Path) -> str:
    """Names of the deeds that succeeded, for a worker of the node with that folder."""
    escapes: dict[str, Callable[[], object]] = {
        "socket": socket.socket,
        "connect": lambda: socket.create_connection(
            ("127.0.0.1", int(os.environ["HYPERGPU_WORKER_PORT"]))
        ),
        "unix socket": lambda: socket.socket(socket.AF_UNIX),
        "read key": (node / "identity.key").read_bytes,
        "read passphrase": lambda: node.with_name(f"{node.name}.passphrase").read_bytes(),
        "read another job": lambda: list((node / "jobs" / "job-000000000009").iterdir()),
        "read blobs": lambda: list((node / "blobs").iterdir()),
        "write beside": lambda: (node / "written").write_text("x"),
        "write inputs": lambda: (node / "inputs" / "written").write_text("x"),
        "write packages": lambda: Path(__file__).with_name("written").write_text("x"),
        "link out": lambda: os.link(node / "inputs" / "given", node / "open" / "linked"),
        "signal others": lambda: os.kill(int(os.environ["HYPERGPU_WORKER_DAEMON"]), 0),
        "see others": lambda: Path(
            "/proc", os.environ["HYPERGPU_WORKER_DAEMON"], "environ"
        ).read_bytes(),
        "child reads key": lambda: subprocess.run(
            ["/bin/cat", node / "identity.key"], check=True, capture_output=True
        ),
        "secret": lambda: os.environ["AWS_SECRET_ACCESS_KEY"],
        # What it must be able to do.
        "own folder": lambda: (node / "open" / "own").write_text("x"),
        "scratch": lambda: (node / "scratch" / "own").write_text("x"),
        "home": lambda: (Path.home() / "home").write_text("x"),
        "inputs": (node / "inputs" / "given").read_bytes,
        "pair": socket.socketpair,
        "null device": lambda: Path(os.devnull).write_bytes(b"nothing"),
        "child": lambda: subprocess.run(["/bin/true"], check=True),
    }
    return "did: " + ", ".join(name for name, deed in escapes.items() if succeeds(deed))


def succeeds(deed: Callable[[], object]) -> bool:
    """Whether a deed raises nothing."""
    try:
        deed()
    except (OSError, KeyError, subprocess.CalledProcessError):
        return False
    return True


def install(folder: Path) -> str:
    """Put the package's metadata into a folder; gives the path that Python then finds it on."""
    about = folder / "unruly_workload-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Name: unruly-workload\nVersion: 1.0\n", "utf-8")
    points = f"[hypergpu.workloads]\n{NAME} = {__name__}:ENTRY\n"
    (about / "entry_points.txt").write_text(points, "utf-8")
    return f"{folder}:{Path(__file__).parent.parent}"
