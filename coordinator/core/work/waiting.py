"""How long a job waits for a node's work, by what is known of the node itself.

A node that heartbeats and reports progress may never deliver: only work that is in speaks for it.
What a forecast or its own pace allows is its limit; a node that is over its limit is late. Which
part of a job waits for whom beyond that, such as a round for its quorum, is the kind's own rule.
"""

from coordinator.core.work.standing import Standing
from hypergpu.units import Milliseconds

FORECAST_TIMES = 2
PACE_TIMES = 3
"""Where nothing is forecast, what its own work took is all that is known of a node."""
LEAST_MS = Milliseconds(1_000)
"""Nobody is late sooner, however little there is to do: what is as good as immediate is hardly ever
later than this, on a busy machine too.
"""
UNPLANNED_LEAST_MS = Milliseconds(15_000)
"""Where nothing is planned nobody is late sooner: a node that is gone for so long is lost, too."""
UNHEARD_MS = Milliseconds(600_000)
"""Without any work that is in, a piece stays so long with its node while another node is idle."""


def forecast_limit_ms(forecast_ms: float, least_ms: Milliseconds) -> float:
    """Limit for a node whose work has a forecast: twice the forecast, at least `least_ms`."""
    return max(least_ms, FORECAST_TIMES * forecast_ms)


def pace_limit_ms(standing: Standing, units: int) -> int:
    """How long a node may take by its own pace, where nothing is planned; 0: its pace is unknown.

    Args:
        standing: The node's.
        units: Units of the work that it has.
    """
    if not standing.pace_ms:
        return 0
    return max(UNPLANNED_LEAST_MS, PACE_TIMES * standing.pace_for(units))
