"""`hypergpu status`: the node of this machine, read from the report that its daemon writes."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hypergpu.clock import unix_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.node_report import (
    ALIVE,
    DEVICE_FOLDERS,
    REPORT_FILE,
    SILENT,
    NodeReport,
    judge_report,
)
from hypergpu.user.terminal.node_view import Onlooker, Row, plain_lines, report_rows, screen
from hypergpu.user.terminal.output import say, say_json, span

_REPORT_BYTES_MAX = 1 << 20
_REFRESH_S = 0.25


def read_report(folder: Path) -> NodeReport:
    """The newest report of the node in a folder, judged now, with those of its machine's other
    devices.

    Raises:
        HyperGPUError: As `_read_one`.
    """
    report = _read_one(folder)
    reports = [_read_one(path.parent) for path in folder.glob(f"{DEVICE_FOLDERS}/{REPORT_FILE}")]
    others = [each for each in reports if each.process_id == report.process_id]
    others.sort(key=lambda each: (len(each.state_dir), each.state_dir))
    return msgspec.structs.replace(report, others=tuple(others))


def _read_one(folder: Path) -> NodeReport:
    """The newest report of the node in a folder, judged now.

    Raises:
        HyperGPUError: NODE_NOT_JOINED, there is no node; NODE_STOPPED, it never ran since it
            joined; FILE_UNUSABLE, the report belongs to another user or is damaged.
    """
    path = folder / REPORT_FILE
    try:
        with path.open("rb") as file:
            content = file.read(_REPORT_BYTES_MAX)
        report = msgspec.json.decode(content, type=NodeReport)
    except FileNotFoundError:
        raise _absence(folder) from None
    except OSError as error:
        detail = f"{path} cannot be read: {error.strerror}"
        fix = "run it as the user whose node it is"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix) from error
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        detail = f"{path} is no node's report"
        fix = "let node and command be of one version: pip install --upgrade hypergpu"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix) from error
    return judge_report(report, unix_ms(), is_alive=_is_alive(report.process_id))


def _absence(folder: Path) -> HyperGPUError:
    if (folder / "identity.key").exists():
        detail = f"the node in {folder} does not run"
        return HyperGPUError(Reason.NODE_STOPPED, detail, fix=_start_again(folder))
    detail = f"there is no node in {folder}"
    fix = "start one: hypergpu join TOKEN; or name its folder: --state-dir FOLDER"
    return HyperGPUError(Reason.NODE_NOT_JOINED, detail, fix=fix)


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def show_once(folder: Path, *, as_json: bool) -> None:
    """Print the newest report.

    Raises:
        HyperGPUError: As `read_report`, and NODE_STOPPED, the node does not run or says nothing.
    """
    report = read_report(folder)
    if as_json:
        say_json(report)
    else:
        for line in plain_lines(_rows(report)):
            say(line)
    _check_running(report)


def watch(folder: Path) -> None:
    """Show reports in place until the node has ended.

    Raises:
        HyperGPUError: As `read_report`, and NODE_STOPPED, the node did not run or died.
    """
    from rich.console import Console
    from rich.live import Live

    report = read_report(folder)
    was_running = report.state in ALIVE
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(screen(_rows(report), console.width), refresh=True)
            if report.state not in ALIVE | {SILENT}:
                break
            time.sleep(_REFRESH_S)
            report = read_report(folder)
    has_left = was_running and report.state != "died"
    if not has_left and not _is_own(report):
        _check_running(report)


def _rows(report: NodeReport) -> Iterator[Row]:
    for each in (report, *report.others):
        yield from report_rows(each, _onlooker(each))


def _is_own(report: NodeReport) -> bool:
    """Whether the daemon started this process to be shown on its terminal."""
    return os.getppid() == report.process_id


def _onlooker(report: NodeReport) -> Onlooker:
    return Onlooker(unix_ms(), is_owner=_is_own(report))


def _check_running(report: NodeReport) -> None:
    if report.state in ALIVE:
        return
    ago = span(max(0, (unix_ms() - report.at_ms) // 1000))
    if report.state == SILENT:
        detail = f"the node has reported nothing for {ago}: {report.reason}"
        fix = f"let it go on: kill -CONT {report.process_id}; or free disk space"
        raise HyperGPUError(Reason.NODE_STOPPED, detail, fix=fix)
    reason = f": {report.reason}" if report.reason else ""
    detail = f"the node does not run: {report.state} {ago} ago{reason}"
    raise HyperGPUError(Reason.NODE_STOPPED, detail, fix=_start_again(Path(report.state_dir)))


def _start_again(folder: Path) -> str:
    return f"start it again: hypergpu join --state-dir {folder}"
