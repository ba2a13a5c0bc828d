"""Updates that repeat an earlier one: fingerprints of updates, kept across rounds.

A fingerprint is the signs of 256 numbers of an update's secret sketch. Two differ in a part of the
bits that is the angle between the updates, as a part of half a turn. Honest updates of two rounds
differ much alike for all nodes; one that is sent again, with noise or through another rounding, is
far nearer to what was there before.
"""

from collections.abc import Mapping
from statistics import median

import numpy as np
import numpy.typing as npt

from coordinator.shell.aggregation.sketch import Sketch
from hypergpu.ids import NodeId

BITS = 256
KEPT = 3
"""Newest fingerprints of each node that are kept."""
_NODES_LEAST = 3
_SHARE = 0.15
"""An update nearer to an earlier one than this part of the usual distance repeats it."""
_USUAL_LEAST = 16
"""Bits. Where most updates differ from earlier ones by fewer, as those of a small model whose
coordinates keep their signs, nothing tells an honest update from one that is sent again.
"""
Fingerprints = Mapping[NodeId, tuple[str, ...]]


def fingerprint(sketch: Sketch) -> str:
    """The signs of a sketch's first `BITS` numbers, in hexadecimal digits."""
    return np.packbits(sketch[:BITS] > 0).tobytes().hex()


def find_repeats(known: Fingerprints, sketches: Mapping[NodeId, Sketch]) -> frozenset[NodeId]:
    """Nodes whose update repeats any that a node sent before.

    Args:
        known: Fingerprints of earlier rounds' updates.
        sketches: Of the round's sound updates that are not empty.
    """
    before = _signs([each for fingerprints in known.values() for each in fingerprints])
    if not len(before) or len(sketches) < _NODES_LEAST:
        return frozenset()
    own = _signs([fingerprint(each) for each in sketches.values()])
    differences = ((BITS - (own @ before.T).max(axis=1)) / 2).tolist()
    usual = median(differences)
    limit = _SHARE * usual if usual >= _USUAL_LEAST else 0.0
    return frozenset(
        node for node, count in zip(sketches, differences, strict=True) if count < limit
    )


def remember(
    known: Fingerprints, sketches: Mapping[NodeId, Sketch], repeats: frozenset[NodeId]
) -> dict[NodeId, tuple[str, ...]]:
    """Fingerprints after the round. A repeated update leaves its node's as they are, so that it is
    known in later rounds too.
    """
    new_fingerprints = {
        node: (*known.get(node, ()), fingerprint(sketch))[-KEPT:]
        for node, sketch in sketches.items()
        if node not in repeats
    }
    return {**known, **new_fingerprints}


def _signs(fingerprints: list[str]) -> npt.NDArray[np.float32]:
    """Rows of 1 and -1, whose products are whole numbers and exact."""
    octets = np.frombuffer(bytes.fromhex("".join(fingerprints)), np.uint8)
    return 1 - 2 * np.unpackbits(octets).reshape(-1, BITS).astype(np.float32)
