"""Programs of a folder, and those that a command has left behind."""

from pathlib import Path

import psutil

GONE_WITHIN_S = 60


def processes_in(folder: Path) -> list[psutil.Process]:
    """Living processes that were told to use a path in ``folder``."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or ())
    ]


def processes_left(folder: Path) -> list[psutil.Process]:
    """Those of them that stay; what was killed may take a moment to go."""
    psutil.wait_procs(processes_in(folder), timeout=GONE_WITHIN_S)
    return processes_in(folder)
