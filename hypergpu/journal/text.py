"""Rounds, figures and names as sentences about a job have them."""

import re
from collections.abc import Mapping


def round_from_one(reason: str) -> str:
    """The same reason with rounds from 1, of a journal of a version that wrote ``round 3`` for the
    fourth. Today's reasons count from 1 themselves (`hypergpu.units.round_text`) and stay.

    The model of a round is the one after so many rounds: there both count alike.
    """
    plain = r"(?<!model of )\bround (\d+)\b"
    return re.sub(plain, lambda match: f"round {int(match[1]) + 1}", reason)


def score(value: float | None) -> str:
    """A loss or metric; a dash before the first."""
    return "-" if value is None else f"{value:.4f}"


def metrics_text(name: str, value: float | None, others: Mapping[str, float]) -> str:
    """A metric and the further ones in a line."""
    values = {name or "metric": value, **others}
    return ", ".join(f"{metric} {score(number)}" for metric, number in values.items())


def short(name: str) -> str:
    """A node's id or a digest, cut to what tells it apart."""
    return name if len(name) <= 14 else f"{name[:10]}..."
