"""What the performers of all kinds of work are made of. Each takes out of it what it uses: beside
the start of a kind's performer only `coordinator.shell.app` gets it whole.
"""

from typing import NamedTuple

from coordinator.config import Settings
from coordinator.shell.driver.performing import Performing
from coordinator.shell.engine.evaluation import Evaluators
from coordinator.shell.engine.heavy_work import HeavyWork
from coordinator.shell.nodes.fleet import Fleet
from coordinator.shell.store.storage import Storage


class WorkResources(NamedTuple):
    """Made once, at the start of a coordinator."""

    settings: Settings
    performing: Performing
    storage: Storage
    fleet: Fleet
    evaluators: Evaluators
    heavy: HeavyWork


def add_performers(resources: WorkResources) -> None:
    """Make the performers of the driver's kinds, and let them carry out what jobs command."""
    for kind in resources.performing.driver.kinds:
        resources.performing.add(kind.core.name, kind.performer(resources))
