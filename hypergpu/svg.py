"""The few SVG elements that our pictures need, as text."""

from html import escape
from itertools import pairwise

Point = tuple[float, float]


def text(x: float, y: float, words: str, *, style: str = "", anchor: str = "start") -> str:
    """One line of text; ``style`` names a class of the picture's style sheet."""
    attribute = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attribute}>{escape(words)}</text>'


def box(corner: Point, size: Point, *, style: str, title: str = "") -> str:
    """A rectangle; ``title`` is what a browser shows above it."""
    place = f'x="{corner[0]:.1f}" y="{corner[1]:.1f}" width="{size[0]:.1f}" height="{size[1]:.1f}"'
    return f'<rect {place} class="{style}"><title>{escape(title)}</title></rect>'


def line(start: Point, end: Point, *, style: str) -> str:
    """A straight line."""
    ends = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
    return f'<line {ends} class="{style}"/>'


def steps(points: list[Point], right: float, *, style: str, floor: float | None = None) -> str:
    """A line that keeps each height until the next point, and the last one until ``right``.

    With a floor, the area down to it.
    """
    corners = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (_, before), (x, y) in pairwise(points):
        if y != before:
            corners.append(f"H{x:.1f}V{y:.1f}")
    corners.append(f"H{right:.1f}")
    if floor is not None:
        corners.append(f"V{floor:.1f}H{points[0][0]:.1f}Z")
    return f'<path d="{"".join(corners)}" class="{style}"/>'


def curve(points: list[Point], *, style: str) -> str:
    """A line through points."""
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="{style}"/>'


def area(upper: list[Point], lower: list[Point], *, style: str) -> str:
    """What lies between two lines of the same length."""
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *reversed(lower)])
    return f'<polygon points="{corners}" class="{style}"/>'
