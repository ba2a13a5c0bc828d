from pathlib import Path

import pytest

from netsim.reference.cells import MIDDLE, PROBES, cells
from netsim.reference.guest import MODULES, Measured, answers, script
from netsim.reference.machine import command
from netsim.reference.report import reference, table
from netsim.refusal import RefusedError
from netsim.tc.commands import commands
from netsim.tc.plan import needs, plan

CELLS = cells()[:2]
WORLD = plan({cell.name: cell.link for cell in CELLS}, MIDDLE, prefix="netsim")
NUMBERS = (
    "rtt_us=50060 rtt_median_us=50056 rtt_p99_us=50070 echoes=50 sent=2000 lost=20 bursts=5"
    " delay_us=25030 deviation_us=12 down0_us=1900000 down1_us=2100000 up0_us=600000"
)
CONSOLE = (
    f"measured {CELLS[0].name} {NUMBERS}\r\nmeasured {CELLS[1].name} {NUMBERS}\r\nfinished\r\n"
)


def init() -> str:
    return script(WORLD, CELLS, python="/usr/bin/python3.11")


def test_every_cell_has_its_own_name() -> None:
    names = [cell.name for cell in cells()]
    assert len(set(names)) == len(names)


def test_the_guests_world_is_the_plan_of_tc() -> None:
    lines = init().splitlines()
    first = lines.index(next(commands(WORLD)))
    planned = list(commands(WORLD))
    assert lines[first : first + len(planned)] == planned


def test_the_guest_has_a_module_for_every_part_that_a_link_needs() -> None:
    parts = {need.part for need in needs({cell.name: cell.link for cell in cells()})}
    in_the_kernel = {"cubic", "reno"}
    modules = {"netem": "sch_netem", "tbf": "sch_tbf", "ingress": "sch_ingress", "bbr": "tcp_bbr"}
    assert {modules[part] for part in parts - in_the_kernel} <= set(MODULES)


def test_every_cell_is_asked_in_its_own_namespace_after_the_answerer_is_ready() -> None:
    lines = init().splitlines()
    ready = lines.index("until test -e /tmp/ready; do sleep 1; done")
    for cell in CELLS:
        asked = f"ip netns exec netsim-{cell.name} /usr/bin/python3.11 -S -E -s -B"
        (at,) = [number for number, line in enumerate(lines) if line.startswith(asked)]
        assert at > ready
        assert lines[at].endswith(f"ask {cell.name} 10.77.0.1 {PROBES} 4")


def test_the_guest_ends_however_its_script_ends() -> None:
    assert init().index("trap 'poweroff -f' EXIT") < init().index("set -e")


def test_answers_are_read_from_the_console() -> None:
    first, second = answers(CONSOLE)
    assert first == Measured(
        name=CELLS[0].name,
        rtt_us=50060,
        rtt_median_us=50056,
        rtt_p99_us=50070,
        echoes=50,
        sent=2000,
        lost=20,
        bursts=5,
        delay_us=25030,
        deviation_us=12,
        downloads_us=(1_900_000, 2_100_000),
        uploads_us=(600_000,),
    )
    assert second.name == CELLS[1].name


@pytest.mark.parametrize("console", ["", "Kernel panic - not syncing\n", CONSOLE[:-12]])
def test_a_guest_that_stopped_early_is_refused_with_its_last_words(console: str) -> None:
    with pytest.raises(RefusedError, match=r"its last words: \S+"):
        answers(console)


def test_the_table_has_what_was_asked_beside_what_was_measured() -> None:
    found = reference("6.1", 2, cells=CELLS, measured=answers(CONSOLE))
    headings, first, second = table(found).splitlines()
    assert headings.split()[:3] == ["link", "RTT", "ms"]
    assert "0 / 50.06" in first
    assert "50 / 50.06" in second
    assert "1.90 2.10 (median 2.00)" in first


def test_the_guests_clock_owes_nothing_to_ours() -> None:
    words = command(Path("kernel"), Path("initrd"), Path("console"))
    assert words[words.index("-icount") + 1].startswith("shift=0,sleep=off,align=off,rr=record")
    assert words[words.index("-nic") + 1] == "none"
