"""The demo over lines that people have: it starts itself again under links held open."""

import os
import sys
from collections.abc import Sequence

from hypergpu.cluster.processes import program
from hypergpu.terminal.failure import usage_error

NONE = "none"
NETS = ("proxy", "tunnel", "tc", NONE)
PROFILES = ("home-fibre", "home-cable", "home-dsl", "lte-moving", "starlink")


def run_over_lines(net: str, nodes: int, arguments: Sequence[str]) -> None:
    """Become `netsim shape`, which runs the demo with these arguments over one line a node.

    Args:
        net: One of `NETS` but ``none``.
        nodes: With more than there are profiles, each comes again.
        arguments: Of `hypergpu demo`.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, there is no such net.
    """
    if net not in NETS:
        raise usage_error(f"--net {net}: there is no such net", f"choose one of {', '.join(NETS)}")
    profiles = [PROFILES[number % len(PROFILES)] for number in range(nodes)]
    demo = program("hypergpu.cli", "demo", *arguments)
    shape = program("netsim", "shape", "--backend", net, *profiles, "--", *demo)
    sys.stdout.flush()
    os.execv(shape[0], shape)  # noqa: S606 - our own program
