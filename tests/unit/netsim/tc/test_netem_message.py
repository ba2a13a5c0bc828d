"""Our netlink messages against those of iproute2 6.1, recorded from the program itself."""

import json
from pathlib import Path
from statistics import NormalDist
from struct import unpack
from typing import Any

import msgspec
import pytest
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from netsim.link.link import Direction
from netsim.tc import netem_message
from netsim.tc.commands import netem_words
from netsim.tc.queues import Netem, queues

GOLDEN = Path(__file__).parents[3] / "vectors/netsim/netem_messages.json"
CASES = json.loads(GOLDEN.read_bytes())
named = pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])


def netem(case: dict[str, Any]) -> Netem:
    planned = queues(msgspec.convert(case["direction"], Direction)).netem
    assert planned is not None
    return planned


def encoded(planned: Netem) -> bytes:
    """Return what stands in the message's options; the table of the distribution aside."""
    fields = netem_message.options(planned)
    fields["attrs"] = [each for each in fields["attrs"] if each[0] != "TCA_NETEM_DELAY_DIST"]
    netem_message.install()
    message = tcmsg()
    message["attrs"] = [("TCA_KIND", "netem"), ("TCA_OPTIONS", fields)]
    message.encode()
    kind_end = 16 + 20 + 12
    return bytes(message.data[kind_end + 4 :])


@named
def test_the_command_is_the_committed_one(case: dict[str, Any]) -> None:
    assert netem_words(netem(case)) == case["words"]


@named
def test_the_message_is_the_one_that_tc_sends_for_the_command(case: dict[str, Any]) -> None:
    ours, theirs = encoded(netem(case)), bytes.fromhex(case["options"])
    assert len(ours) == len(theirs)
    # A command has six decimals of a percentage, a message has 32 bits.
    for at in range(0, len(ours), 4):
        mine, other = (int.from_bytes(each[at : at + 4], "little") for each in (ours, theirs))
        assert abs(mine - other) <= 64, at


def test_the_table_of_the_distribution_is_normal() -> None:
    table = unpack(f"={netem_message.TABLE_ENTRIES}h", netem_message.normal_table())
    assert list(table) == sorted(table)
    assert sum(table) == 0
    variance = sum(entry * entry for entry in table) / len(table) / netem_message.TABLE_SCALE**2
    assert variance == pytest.approx(NormalDist().variance, rel=0.01)
