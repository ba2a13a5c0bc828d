"""Links out of a command's arguments: a world file, or profiles by name."""

from collections import Counter
from collections.abc import Sequence

from netsim.ground.interface import Links
from netsim.profiles import profile
from netsim.proxy.messages import COORDINATOR_LINK
from netsim.tunnel.shape import Shape


def links_of_profiles(names: Sequence[str], seed: int) -> Links:
    """One node for each name; a name that comes twice is numbered.

    Raises:
        RefusedError: There is no such profile.
    """
    found = [profile(name) for name in names]
    often = Counter(each.name for each in found)
    seen: Counter[str] = Counter()
    nodes: dict[str, Shape] = {}
    for each in found:
        seen[each.name] += 1
        name = f"{each.name}-{seen[each.name]}" if often[each.name] > 1 else each.name
        nodes[name] = Shape(link=each.link, variation=each.variation)
    return Links(nodes=nodes, coordinator=Shape(link=COORDINATOR_LINK), seed=seed)
