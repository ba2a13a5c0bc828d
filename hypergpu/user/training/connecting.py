"""The connection of a script or notebook that states none. Importing this imports no torch."""

import atexit

from hypergpu.user.client import Coordinator, connect


def connect_until_exit() -> Coordinator:
    """A connection that stays open for the run's later calls."""
    coordinator = connect()
    atexit.register(coordinator.close)
    return coordinator
