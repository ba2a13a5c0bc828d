"""Phases of a node's work under one lease, and how long they took. Only people rely on them."""

from enum import Enum

import msgspec

from hypergpu.units import Milliseconds

PHASE_MS_MAX = Milliseconds(7 * 86_400_000)
"""A longer phase counts as this long."""


class WorkPhase(Enum):
    """What a node does under a lease, in this order."""

    DOWNLOAD = "download"  # the model and the data
    TRAIN = "train"
    ENCODE = "encode"  # known once it is over
    WAIT = "wait"  # for the planned start of the upload, or for the link
    UPLOAD = "upload"


class PhaseDurations(msgspec.Struct, frozen=True):
    """How long each `WorkPhase` took; 0: nothing, or it is not known.

    A phase lasts until the next one begins: retries and the pauses between them are part of it. So
    an upload counts from its first attempt, and a training has the restarts of its worker.
    """

    download_ms: Milliseconds = Milliseconds(0)
    train_ms: Milliseconds = Milliseconds(0)
    encode_ms: Milliseconds = Milliseconds(0)
    wait_ms: Milliseconds = Milliseconds(0)
    upload_ms: Milliseconds = Milliseconds(0)
