"""What pyroute2's netem leaves out: bursts of loss and a normal distribution of the delay.

pyroute2 (0.9) encodes loss as independent and no distribution. This describes the message in full,
as ``include/uapi/linux/pkt_sched.h`` has it, and puts it in the place of pyroute2's own.
"""

from functools import cache
from statistics import NormalDist
from struct import pack
from typing import Any

from pyroute2.netlink import nla
from pyroute2.netlink.rtnl import TC_H_ROOT
from pyroute2.netlink.rtnl.tcmsg import plugins
from pyroute2.netlink.rtnl.tcmsg.common import percent2u32, time2tick

from netsim.tc.queues import Netem

TABLE_ENTRIES = 4096
TABLE_SCALE = 8192
"""Of one standard deviation in the table."""
LARGEST_ENTRY = (1 << 15) - 1


class Options(nla):  # type: ignore[misc]  # pyroute2 has no types
    nla_map = (
        ("TCA_NETEM_UNSPEC", "none"),
        ("TCA_NETEM_CORR", "hex"),
        ("TCA_NETEM_DELAY_DIST", "cdata"),
        ("TCA_NETEM_REORDER", "reorder"),
        ("TCA_NETEM_CORRUPT", "hex"),
        ("TCA_NETEM_LOSS", "loss"),
        ("TCA_NETEM_RATE", "rate"),
    )
    fields = (
        ("delay", "I"),
        ("limit", "I"),
        ("loss", "I"),
        ("gap", "I"),
        ("duplicate", "I"),
        ("jitter", "I"),
    )

    class reorder(nla):  # type: ignore[misc]  # noqa: N801 - pyroute2 looks it up by this name
        fields = (("probability", "I"), ("correlation", "I"))

    class rate(nla):  # type: ignore[misc]  # noqa: N801
        fields = (("rate", "I"), ("overhead", "i"), ("cell_bytes", "I"), ("cell_overhead", "i"))

    class loss(nla):  # type: ignore[misc]  # noqa: N801
        nla_flags = 1 << 15  # nested
        nla_map = (
            ("NETEM_LOSS_UNSPEC", "none"),
            ("NETEM_LOSS_GI", "hex"),
            ("NETEM_LOSS_GE", "gilbert_elliott"),
        )

        class gilbert_elliott(nla):  # type: ignore[misc]  # noqa: N801
            # h and k1 are the shares that arrive in the bad state and are lost in the good one.
            fields = (("p", "I"), ("r", "I"), ("h", "I"), ("k1", "I"))


def options(netem: Netem) -> dict[str, Any]:
    """Return the fields and attributes of a netem's message."""
    attributes: list[tuple[str, Any]] = []
    if netem.reordering:
        share = {"probability": _share(netem.reordering), "correlation": 0}
        attributes.append(("TCA_NETEM_REORDER", share))
    if netem.loss:
        chain = {"p": _share(netem.loss.p), "r": _share(netem.loss.r), "h": 0, "k1": 0}
        attributes.append(("TCA_NETEM_LOSS", {"attrs": [("NETEM_LOSS_GE", chain)]}))
    if netem.bits_per_s:
        line = {"rate": netem.bits_per_s // 8, "overhead": 0, "cell_bytes": 0, "cell_overhead": 0}
        attributes.append(("TCA_NETEM_RATE", line))
    if netem.jitter_us:
        attributes.append(("TCA_NETEM_DELAY_DIST", normal_table()))
    return {
        "delay": int(time2tick(netem.delay_us)),
        "limit": netem.limit_packets,
        "loss": 0,
        "gap": 1 if netem.reordering else 0,
        "duplicate": _share(netem.duplication),
        "jitter": int(time2tick(netem.jitter_us)),
        "attrs": attributes,
    }


@cache
def normal_table() -> bytes:
    """Return the inverse of the normal distribution, as netem looks it up: 16-bit, native order."""
    normal = NormalDist()
    points = (normal.inv_cdf((i + 0.5) / TABLE_ENTRIES) for i in range(TABLE_ENTRIES))
    entries = [round(TABLE_SCALE * point) for point in points]
    bounded = [max(-LARGEST_ENTRY, min(LARGEST_ENTRY, entry)) for entry in entries]
    return pack(f"={TABLE_ENTRIES}h", *bounded)


def _share(share: float) -> int:
    return int(percent2u32(100 * share))


class Plugin:
    """The interface that pyroute2 expects of a kind of queue."""

    parent = TC_H_ROOT
    options = Options

    @staticmethod
    def get_parameters(words: dict[str, Any]) -> dict[str, Any]:
        """Encode the ``netem`` of a request."""
        return options(words["netem"])

    @staticmethod
    def fix_request(words: dict[str, Any]) -> None:
        """Take our own word out of the request."""
        words.pop("netem", None)


def install() -> None:
    """Let this process's pyroute2 encode netem like this."""
    plugins["netem"] = Plugin
