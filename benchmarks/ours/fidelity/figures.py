"""What one backend brings to the fidelity table."""

from collections.abc import Mapping, Sequence

import msgspec

Row = tuple[str, str, str, str]
"""What, asked, measured, error."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Rows for people, metrics for whoever checks."""

    rows: Sequence[Row]
    metrics: Mapping[str, float]
    notes: Sequence[str] = ()
