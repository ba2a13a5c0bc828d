"""What a node does, and why it has no work though jobs wait for nodes, in words for its owner.
Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple

from gpu_node.core.limits import TRAINING_KIND, OwnerLimits
from hypergpu.farm.map_request import item_kind_of
from hypergpu.serving.serve_request import GGUF_KIND, TUNED_KIND

KINDS_MOST = 16


class WaitingWork(NamedTuple):
    """Work that jobs wait for nodes with, as the coordinator told."""

    kind: str
    """Name of a kind of packed work, such as ``map/embed``, or ``training``."""
    reason: str = ""
    """Why the node gets none though it offers the kind; empty: it does not offer it."""


def idle_reasons(waiting: Sequence[WaitingWork], limits: OwnerLimits) -> tuple[str, ...]:
    """A sentence for each kind of work that the node gets none of, with the line that allows it.

    Args:
        waiting: Kinds that the node does not offer, or is not fit for.
        limits: The owner's.
    """
    return tuple(_sentence(work, limits) for work in waiting[:KINDS_MOST])


_EXTRAS = {GGUF_KIND: "gguf", TUNED_KIND: "farm,hf"}
"""Extras that a kind of work needs, where it is not those of most."""


def _sentence(work: WaitingWork, limits: OwnerLimits) -> str:
    text = f"a job of kind {item_kind_of(work.kind) or work.kind} waits"
    if work.reason:
        return f"{text}, and this node does not fit: {work.reason}"
    if refusal := limits.refusal_of_kind(work.kind):
        return f"{text}: {refusal}"
    extra = _EXTRAS.get(work.kind, "farm")
    return f"{text}, which this node's worker cannot do: pip install 'hypergpu[{extra}]' there"


def work_summary(limits: OwnerLimits) -> str:
    """What a node will do by its owner's limits, and how its owner allows more or less."""
    kinds = " and ".join(limits.kinds)
    text = f"this machine will do work of kind {kinds}"
    if limits.spec_keys:
        text += f", of farm jobs what {len(limits.spec_keys)} pinned keys signed"
    if limits.kinds != (TRAINING_KIND,):
        return f"{text}; its owner changes that by kinds in node.toml or --kinds"
    return f"{text} alone; its owner adds kinds of farm jobs: --kinds training,embed"
