"""What the owner of a node sees of it, at the widths of terminals, and what a reader makes of a
report that is old.
"""

import os
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from hypergpu.clock import unix_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.node_report import (
    DIED,
    REPORT_FILE,
    RUNNING,
    SILENT,
    SILENT_AFTER_MS,
    EarnedReport,
    JudgementReport,
    LimitsReport,
    LinkReport,
    NodeReport,
    SetbackReport,
    WorkReport,
    WorkTotals,
    judge_report,
)
from hypergpu.user.cli.status import read_report, show_once
from hypergpu.user.terminal.node_view import Onlooker, plain_lines, report_rows, screen

NOW_MS = 1_700_000_000_000
REPORT = NodeReport(
    node="0x" + "ab" * 20,
    name="attic",
    state=RUNNING,
    process_id=4711,
    started_at_ms=NOW_MS - 8_000_000,
    at_ms=NOW_MS,
    device="NVIDIA GeForce GTX 1080",
    link=LinkReport(
        coordinator="203.0.113.7:7701",
        state="connected",
        since_ms=NOW_MS - 61_000,
        round_trip_us=23_400,
        longest_round_trip_us=80_000,
        up_bits_per_s=11.2e6,
        down_bits_per_s=48e6,
    ),
    work=WorkReport(
        job="job-0123456789ab",
        round=11,
        workload="digits-softmax",
        phase="train",
        since_ms=NOW_MS - 12_000,
        plan="H=64, int4, uplink 11 Mbit/s, forecast 31 s, deadline 42 s",
        steps_done=32,
        steps_total=64,
        batch_size=32,
        loss=1.25,
    ),
    totals=WorkTotals(31, 63_488, 1, 2),
    setbacks=(
        SetbackReport(
            at_ms=NOW_MS - 240_000,
            job="job-0123456789ab",
            round=6,
            kind="late",
            reason="UPDATE_LATE: round 7 is closed",
        ),
    ),
    judgements=(
        JudgementReport(
            at_ms=NOW_MS - 60_000,
            job="job-0123456789ab",
            reason="round #11: counts 0.42 in the fold",
        ),
    ),
    earned=EarnedReport(31, 60_000, 0),
    limits=LimitsReport(worker_threads=2, cache_bytes=20 << 30, drain_limit_ms=25_000),
    state_dir="/home/ann/.local/share/hypergpu/node",
    log="/home/ann/.local/share/hypergpu/node/node.log",
    page="https://example.org:7780/#/mine/0x" + "ab" * 20,
)
OWNER = Onlooker(NOW_MS, is_owner=True)
EXPECTED_AT_80 = """\
node         attic (0xabababab...), NVIDIA GeForce GTX 1080
state        running, started 2 h 13 min ago
coordinator  203.0.113.7:7701, connected for 61 s
line         round trip 23.4 ms, at worst 80 ms, up 11.2 Mbit/s, down 48 Mbit/s
now          round 12 of job-01234567 (digits-softmax): trains for 12 s
             ━━━━━━━━━───────── 32/64 inner steps of 32, loss 1.2500
plan         H=64, int4, uplink 11 Mbit/s, forecast 31 s, deadline 42 s
updates      31 accepted (63,488 samples), 1 rejected, 2 late
             round 7 late 4 min 00 s ago: UPDATE_LATE: round 7 is closed
judged       round #11: counts 0.42 in the fold
earned       31 receipts, 60,000 samples at full quality; hypergpu ledger claim
limits       2 threads, 21.5 GB of downloads kept
log          /home/ann/.local/share/hypergpu/node/node.log
page
  https://example.org:7780/#/mine/0xabababababababababababababababababababab
leave        Ctrl-C lets it finish or hand back its work, 25 s at most; twice
             stops at once
"""
EXPECTED_AT_40 = """\
node  attic (0xabababab...), NVIDIA
  GeForce GTX 1080
state  running, started 2 h 13 min ago
coordinator  203.0.113.7:7701,
  connected for 61 s
line  round trip 23.4 ms, at worst 80
  ms, up 11.2 Mbit/s, down 48 Mbit/s
now  round 12 of job-01234567
  (digits-softmax): trains for 12 s
  ━━━━━━━━━───────── 32/64 inner steps
  of 32, loss 1.2500
"""


def shown_at(width: int, report: NodeReport = REPORT) -> str:
    console = Console(width=width, record=True, file=StringIO())
    console.print(screen(report_rows(report, OWNER), width))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"


def test_the_view_fills_a_usual_terminal() -> None:
    assert shown_at(80) == EXPECTED_AT_80


def test_work_without_rounds_is_shown_by_its_kind_alone() -> None:
    assert REPORT.work is not None
    plain = replace(REPORT.work, round=0, workload="embed", plan="item 3 of 9", steps_total=0)
    lines = shown_at(80, replace(REPORT, work=plain)).splitlines()
    place = lines.index("now          job-01234567 (embed): works for 12 s")
    assert lines[place + 1] == "plan         item 3 of 9"


def test_kinds_of_work_that_the_owner_allows_come_first_among_limits() -> None:
    limits = replace(REPORT.limits, kinds=("training", "embed"))
    assert "limits       does training and embed, 2 threads" in shown_at(
        80, replace(REPORT, limits=limits)
    )


def test_a_narrow_terminal_gets_every_word() -> None:
    text = shown_at(40)
    assert text.startswith(EXPECTED_AT_40)
    assert max(len(line) for line in text.splitlines()) <= 40
    assert "".join(text.split()) == "".join(shown_at(80).split())


def test_a_broken_connection_is_shown_with_its_reason_and_the_next_try() -> None:
    link = replace(
        REPORT.link, state="waiting to connect", reason="UNAVAILABLE", retry_at_ms=NOW_MS + 4_000
    )
    text = shown_at(80, replace(REPORT, link=link, work=None))
    assert "waiting to connect for 61 s: UNAVAILABLE; again in 4 s" in " ".join(text.split())
    assert "now          waits for work" in text


def test_a_node_that_has_left_shows_what_it_did_and_no_way_to_leave() -> None:
    lines = plain_lines(report_rows(replace(REPORT, state="drained", reason="SIGINT"), OWNER))
    assert "state        drained, 0 s ago: SIGINT" in lines
    assert any("31 accepted" in line for line in lines)
    assert not any(line.startswith(("now", "leave", "coordinator")) for line in lines)


def test_a_report_that_is_old_or_without_a_process_is_not_believed() -> None:
    late_ms = NOW_MS + SILENT_AFTER_MS + 1
    assert judge_report(REPORT, NOW_MS + 1_000, is_alive=True) == REPORT
    assert judge_report(REPORT, NOW_MS + 1_000, is_alive=False).state == DIED
    assert judge_report(REPORT, late_ms, is_alive=True).state == SILENT
    drained_report = replace(REPORT, state="drained")
    assert judge_report(drained_report, late_ms, is_alive=False) == drained_report


def write(folder: Path, report: NodeReport) -> None:
    (folder / REPORT_FILE).write_bytes(msgspec.json.encode(report))


def test_a_machine_without_a_running_node_is_told_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(HyperGPUError, match="there is no node in") as failure:
        read_report(tmp_path)
    assert failure.value.reason is Reason.NODE_NOT_JOINED
    assert "hypergpu join TOKEN" in failure.value.fix
    (tmp_path / "identity.key").touch()
    with pytest.raises(HyperGPUError, match="does not run") as failure:
        read_report(tmp_path)
    assert failure.value.reason is Reason.NODE_STOPPED
    write(tmp_path, replace(REPORT, state="failed", reason="no driver"))
    with pytest.raises(HyperGPUError, match=r"failed .* ago: no driver"):
        show_once(tmp_path, as_json=False)
    assert "31 accepted" in capsys.readouterr().out


def test_a_running_node_is_read_as_it_reports(tmp_path: Path) -> None:
    running_report = replace(REPORT, process_id=os.getpid(), at_ms=unix_ms())
    write(tmp_path, running_report)
    assert read_report(tmp_path) == running_report


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"x":' + b"[" * 5_000, b'{"schema": "hypergpu/status/2"}']
)
def test_a_file_that_is_no_report_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / REPORT_FILE).write_bytes(content)
    with pytest.raises(HyperGPUError, match="is no node's report") as failure:
        read_report(tmp_path)
    assert failure.value.reason is Reason.FILE_UNUSABLE
