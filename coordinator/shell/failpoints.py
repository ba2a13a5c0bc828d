"""Named instants at which a test may kill the process for real.

`HYPERGPU_FAILPOINTS="persist.written:3,upload.stored:1"` sends SIGKILL to the own process at the
third and the first pass of these points. Without it a pass costs a look-up in an empty dictionary.
"""

import os
import signal

from hypergpu.errors import HyperGPUError, Reason

VARIABLE = "HYPERGPU_FAILPOINTS"

NAMES = {
    "decide.begin": "events were taken from the inbox, nothing is decided",
    "decide.done": "the machine has decided, nothing is persisted",
    "persist.written": "events are journalled, nothing is performed",
    "snapshot.begin": "a snapshot is due and not written",
    "snapshot.written": "a snapshot is written",
    "act.begin": "the first command of a drain is about to be performed",
    "act.command": "one command was performed, others of its drain may not be",
    "act.done": "commands are performed, nobody was answered",
    "initialise.made": "the initial model is a file, not yet a blob",
    "initialise.stored": "the initial model is a blob, not yet an event",
    "upload.admitted": "an offer passed every check, its node was not told",
    "upload.received": "some bytes of an update are in quarantine",
    "upload.complete": "all bytes of an update are in quarantine, not yet durable",
    "upload.stored": "an update is a blob, not yet an event",
    "upload.accepted": "an update is journalled, the node was not told",
    "result.stored": "the blob of a result is durable, not yet an event",
    "contribution.accepted": "a result of packed work is journalled, the node was not told",
    "window.counted": "tokens of served answers were counted, not yet an event",
    "aggregate.begin": "updates are about to be folded",
    "aggregate.judged": "a round's updates are judged, nothing is folded",
    "aggregate.folded": "the next model is a file, not yet a blob",
    "aggregate.model_stored": "the next model is a blob, its outer state and delta are not",
    "aggregate.stored": "all blobs of the next model are there, not yet an event",
    "evaluate.done": "an evaluation is done, not yet an event",
    "serve.answer": "an answer of a stream was handed to the transport",
    "collect.begin": "blobs are about to be collected",
    "collect.done": "blobs were collected",
    "create.stored": "a new job's manifest is a blob, the job is not yet an event",
    "recover.replayed": "the journal was replayed, nothing is performed",
    "recover.done": "everything outstanding was performed again",
}

_passes_left: dict[str, int] = {}


def arm(text: str) -> None:
    """Read `NAME:COUNT,...`; COUNT may be left out and is 1 then.

    Raises:
        HyperGPUError: REQUEST_INVALID, a name is unknown or a count is not a positive number.
    """
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, count = entry.partition(":")
        if name not in NAMES or not (count or "1").isdecimal() or int(count or "1") < 1:
            raise HyperGPUError(
                Reason.REQUEST_INVALID,
                f"{VARIABLE} has {entry!r}; it takes NAME:COUNT with a name of --list-failpoints",
            )
        _passes_left[name] = int(count or "1")


def failpoint(name: str) -> None:
    """Pass the point ``name``; armed and due, the process ends here without any clean-up."""
    if name not in _passes_left:
        return
    _passes_left[name] -= 1
    if _passes_left[name] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
