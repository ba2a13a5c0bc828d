"""A picture of a world's links over time: pure text in SVG, no other library."""

from netsim.network.plot.picture import LANES_MAX, world_svg

__all__ = ["LANES_MAX", "world_svg"]
