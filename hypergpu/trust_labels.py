"""Labels that operators give nodes, and that jobs may ask for: no node states them itself."""

import re
from collections.abc import Collection

from hypergpu.errors import HyperGPUError, Reason

LABELS_MOST = 16
_LABEL = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def check_trust_labels(labels: Collection[str]) -> None:
    """Check labels.

    Raises:
        HyperGPUError: REQUEST_INVALID, they are too many, or one is none.
    """
    if len(labels) > LABELS_MOST:
        detail = f"{len(labels)} labels are given"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=f"give {LABELS_MOST} at most")
    for label in labels:
        if not _LABEL.fullmatch(label):
            detail = f"{label[:80]!r} is no label"
            fix = "give 1 to 63 lower-case letters, digits, '-' and '_'"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=fix)
