"""The choices that command lines offer: backends and the fallback. Imports nothing heavy."""

from enum import StrEnum


class Backend(StrEnum):
    """The ways to run real programs over links. The fourth way, virtual time, runs none."""

    PROXY = "proxy"
    TUNNEL = "tunnel"
    TC = "tc"


class Fallback(StrEnum):
    """What to do where the kernel cannot do what the links need."""

    REFUSE = "refuse"
    TUNNEL = "tunnel"
