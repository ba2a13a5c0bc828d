"""Which functions of the project a process calls, and when."""

import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

TRACE_VARIABLE = "HYPERGPU_BENCH_TRACE"
ROOT = str(Path(__file__).parents[2]) + os.sep
SILENT_NS = 1_000_000
"""A function that was logged this short a time before is not logged again."""


def install(folder: str) -> None:
    """Log ``nanoseconds file function`` of each call into a file of this process."""
    path = Path(folder) / f"{os.getpid()}.calls"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    last_ns: dict[CodeType, int] = {}

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT) or code.co_name == "<module>":
            return
        now_ns = time.monotonic_ns()
        if now_ns - last_ns.get(code, 0) > SILENT_NS:
            last_ns[code] = now_ns
            name = code.co_filename.removeprefix(ROOT)
            os.write(log, f"{now_ns} {name} {code.co_qualname}\n".encode())

    threading.setprofile(profile)
    sys.setprofile(profile)
