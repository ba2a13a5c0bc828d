"""What the guest runs and what it says: a script and its answers, as pure functions."""

import re
from collections.abc import Sequence

import msgspec

from netsim.namespaces.host import COORDINATOR
from netsim.reference.cells import PROBES, Cell
from netsim.refusal import RefusedError
from netsim.tc.commands import commands
from netsim.tc.plan import Plan

# In the order in which they need each other.
MODULES = (
    "llc", "stp", "bridge", "veth", "ifb", "sch_netem", "sch_tbf", "sch_ingress", "cls_u32",
    "act_mirred", "tcp_bbr",
)  # fmt: skip
TOOLS = ("bridge", "ip", "tc")
READY = "/tmp/ready"  # noqa: S108 - in the guest, which has one user
PROGRAM = "/guest_program.py"
FINISHED = "finished"
LINE = re.compile(r"^measured (\S+) (.+)$", re.MULTILINE)
PAIR = re.compile(r"(\w+)=(\d+)")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What one node's link did, in the guest."""

    name: str
    rtt_us: int
    rtt_median_us: int
    rtt_p99_us: int
    echoes: int
    sent: int
    lost: int
    bursts: int
    delay_us: int
    deviation_us: int
    downloads_us: tuple[int, ...]
    uploads_us: tuple[int, ...]


def script(plan: Plan, cells: Sequence[Cell], *, python: str) -> str:
    """Write the guest's first and only process.

    Args:
        plan: The world, as the ``tc`` network would build it.
        cells: What to measure, one after another, each in the namespace of its name.
        python: The interpreter's path in the guest.
    """
    program = f"{python} -S -E -s -B {PROGRAM}"
    hosts = {port.name: port for port in plan.ports}
    middle = hosts[COORDINATOR]
    lines = [
        "#!/bin/busybox sh",
        "/bin/busybox --install -s /bin",
        "export PATH=/usr/sbin:/bin PYTHONHASHSEED=0 TC_LIB_DIR=/usr/lib/tc",
        "mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs devtmpfs /dev",
        "mount -t tmpfs tmpfs /run; mount -t tmpfs tmpfs /tmp",
        "trap 'poweroff -f' EXIT",
        # busybox has an `ip` of its own, which its shell would prefer.
        *(f'{tool}() {{ /usr/sbin/{tool} "$@"; }}' for tool in TOOLS),
        "set -e",
        *(f"test ! -e /modules/{name}.ko || insmod /modules/{name}.ko" for name in MODULES),
        *commands(plan),
        f"ip netns exec {middle.namespace} {program} serve {middle.address} {READY} &",
        f"until test -e {READY}; do sleep 1; done",
    ]
    for cell in cells:
        sizes = ",".join(str(size) for size in cell.download_mib)
        question = f"ask {cell.name} {middle.address} {PROBES} {sizes}"
        lines.append(f"ip netns exec {hosts[cell.name].namespace} {program} {question}")
    return "\n".join([*lines, f"echo {FINISHED}", ""])


def answers(console: str) -> tuple[Measured, ...]:
    """Read what the guest printed.

    Raises:
        RefusedError: It did not come to its end.
    """
    text = console.replace("\r", "")
    if FINISHED not in text.splitlines():
        last = " / ".join(text.split("\n")[-6:]).strip(" /") or "nothing"
        raise RefusedError(
            f"the guest stopped early; its last words: {last}",
            "read the console's text in build/reference",
        )
    return tuple(_measured(name, words) for name, words in LINE.findall(text))


def _measured(name: str, words: str) -> Measured:
    values = {key: int(value) for key, value in PAIR.findall(words)}
    downloads = tuple(v for key, v in values.items() if key.startswith("down"))
    uploads = tuple(v for key, v in values.items() if re.fullmatch(r"up\d+_us", key))
    single = {key: values[key] for key in Measured.__struct_fields__ if key in values}
    return Measured(name=name, downloads_us=downloads, uploads_us=uploads, **single)
