"""What a gateway did, for its log."""

import msgspec


class GatewayCounts(msgspec.Struct):
    """Since the last log line, but for what is open."""

    sessions: int = 0
    """Open streams of nodes."""
    answered: int = 0
    """Heartbeats and probes that were answered here."""
    folded: int = 0
    """Messages that were replaced or merged and never went on."""
    passed: int = 0
    """Messages of streams that went on to the coordinator."""
    postponed: int = 0
    """Nodes that were told when to come again."""
    silent: int = 0
    """Nodes that were let go of since they said nothing."""
    calls: int = 0
    """Calls beside the streams."""
    heartbeats: str = ""
    """How often heartbeats come, as the node was told that was greeted last, and why."""

    before: dict[str, int] = {}
    """Sums up to the last log line, of what counts anew after it."""

    def take(self) -> dict[str, int]:
        """All of them; from now on they count anew."""
        counts = {name: getattr(self, name) for name in self.__struct_fields__}
        self.before = self.totals()
        for name in _COUNTED:
            setattr(self, name, 0)
        del counts["before"]
        return counts

    def totals(self) -> dict[str, int]:
        """What was counted since this gateway began, by name."""
        return {name: self.before.get(name, 0) + getattr(self, name) for name in _COUNTED}


_COUNTED = ("answered", "folded", "passed", "postponed", "silent", "calls")
