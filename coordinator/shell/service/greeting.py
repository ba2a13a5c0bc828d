"""What a coordinator greets nodes with, and when it greets one again."""

from dataclasses import dataclass

from coordinator.config import Settings
from coordinator.core.hub.heartbeats import UsualPace
from coordinator.shell.nodes.connected_nodes import ConnectedNodes
from coordinator.shell.nodes.control_stream import ControlStream
from coordinator.shell.probe_echo import ProbeEcho
from coordinator.shell.service.versions import version_message
from coordinator.shell.store.bulk.store import BulkStore
from coordinator.shell.store.journal.coordinators import OtherCoordinators
from hypergpu.v1 import node_pb2


@dataclass(frozen=True)
class Greeter:
    """Makes the greetings of control streams."""

    settings: Settings
    nodes: ConnectedNodes
    echo: ProbeEcho
    bulk: BulkStore
    others: OtherCoordinators
    """Coordinators that may take over from this one."""

    def usual_pace(self) -> UsualPace:
        """Pace of heartbeats while there is room for it."""
        settings = self.settings
        return UsualPace(settings.heartbeat_interval_ms, settings.lost_after_ms)

    def welcome(self, session: ControlStream) -> node_pb2.ControlResponse:
        """The greeting. Said again, it renews the node's probe token, paces its heartbeats and
        tells which coordinators there are.
        """
        session.pace = session.pace.with_streams(self._own_streams(session))
        session.known_coordinators = self.others.node_addresses
        welcome = node_pb2.Welcome(
            version=version_message(),
            heartbeat_interval_ms=session.pace.told.interval_ms,
            probe_port=self.echo.port,
            probe_token=self.echo.token(session.node),
            coordinators=session.known_coordinators,
            bulk_port=self.bulk.port,
        )
        return node_pb2.ControlResponse(welcome=welcome)

    def is_outdated(self, session: ControlStream) -> bool:
        """Whether the node is to be greeted again: what it was told holds no more."""
        if session.known_coordinators != self.others.node_addresses:
            return True
        return session.pace.is_outdated(self._own_streams(session))

    def _own_streams(self, session: ControlStream) -> int:
        """Streams whose heartbeats come here, as far as the node's pace goes: a gateway has its
        own.
        """
        return 0 if session.is_watched else self.nodes.direct_streams
