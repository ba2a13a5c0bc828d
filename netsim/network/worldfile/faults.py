"""The fault script of a world file: who, when, for how long, and what a kind needs to know."""

from collections.abc import Iterator, Mapping

import msgspec

from hypergpu.jobfile.problem import join_words, nearest
from hypergpu.units import Microseconds
from netsim.link import NEVER_US
from netsim.network.worldfile.description import COORDINATOR, Fault, FaultKind
from netsim.network.worldfile.table import Table

HEAL = "heal"
EVERYBODY = "all"
_KINDS = (*FaultKind, HEAL)
_OF_COORDINATOR = (FaultKind.CRASH, FaultKind.SLOW_DISK, FaultKind.CLOCK_JUMP)


def read_faults(
    tables: tuple[Table, ...], groups: Mapping[str, tuple[str, ...]]
) -> Iterator[Fault]:
    """Each fault for each of its targets, ended by the first heal after its beginning.

    Args:
        tables: The ``[[faults]]``.
        groups: Names that a target may have, with the nodes that each stands for.

    Raises:
        NetsimError: A fault is wrong.
    """
    found: list[Fault] = []
    heals: list[tuple[str, int]] = []
    for table in tables:
        kind = _kind(table)
        at_us = table.span_us("at")
        if at_us is None:
            raise table.refused("at", "at is missing", 'say when, for example at = "30s"')
        targets = _targets(table, groups)
        if kind is None:
            heals.extend((target, at_us) for target in targets)
        else:
            fault = _fault(table, kind, at_us)
            if COORDINATOR in targets and kind not in _OF_COORDINATOR:
                fix = f"name nodes; the coordinator knows {join_words(_OF_COORDINATOR)}"
                raise table.refused("nodes", f"the coordinator has no {kind}", fix)
            found.extend(msgspec.structs.replace(fault, target=target) for target in targets)
        table.finish()
    for fault in sorted(found, key=lambda each: each.at_us):
        ends = [at_us for name, at_us in heals if name == fault.target and at_us > fault.at_us]
        yield msgspec.structs.replace(fault, until_us=min([fault.until_us, *ends]))


def _kind(table: Table) -> FaultKind | None:
    said = table.text("kind")
    if said is None or said not in _KINDS:
        meant = nearest(said or "", _KINDS)
        fix = f'did you mean "{meant}"?' if meant else f"choose one of {join_words(_KINDS)}"
        raise table.refused("kind", f'there is no fault "{said}"' if said else "no kind", fix)
    return None if said == HEAL else FaultKind(said)


def _targets(table: Table, groups: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    words = table.words("nodes")
    if words is None:
        raise table.refused("nodes", "nodes is missing", 'name nodes, groups or "all"')
    targets: dict[str, None] = {}
    for name in words:
        if name not in groups:
            meant = nearest(name, list(groups))
            fix = f'did you mean "{meant}"?' if meant else "name a node or a group of this file"
            raise table.refused("nodes", f'there is no node or group "{name}"', fix)
        targets.update(dict.fromkeys(groups[name]))
    return tuple(targets)


def _fault(table: Table, kind: FaultKind, at_us: int) -> Fault:
    for_us = table.span_us("for")
    if for_us == 0:
        raise table.refused("for", "a fault of no length", "lengthen it, or leave for away")
    fault = Fault(
        kind=kind,
        target="",
        at_us=Microseconds(at_us),
        until_us=Microseconds(NEVER_US if for_us is None else at_us + for_us),
    )
    match kind:
        case FaultKind.FLAP:
            every_us = _needed(table, "every", table.span_us("every"), '"10s"')
            return msgspec.structs.replace(fault, every_us=Microseconds(max(2, round(every_us))))
        case FaultKind.SLOW_DISK:
            rate = _needed(table, "mib_per_s", table.number("mib_per_s", 0.001, 1e6), "5")
            return msgspec.structs.replace(fault, bytes_per_s=round(rate * (1 << 20)))
        case FaultKind.CLOCK_JUMP:
            by_s = _needed(table, "by_s", table.number("by_s", -1e9, 1e9), "-3600")
            return msgspec.structs.replace(fault, jump_ms=round(by_s * 1000))
        case FaultKind.CORRUPT:
            percent = table.number("percent", 0, 100)
            return msgspec.structs.replace(fault, share=1.0 if percent is None else percent / 100)
        case FaultKind.LIE | FaultKind.SLOW_DEVICE:
            return msgspec.structs.replace(fault, factor=_factor(table, kind))
        case FaultKind.CRASH | FaultKind.PARTITION:
            return fault


def _factor(table: Table, kind: FaultKind) -> float:
    if kind is FaultKind.SLOW_DEVICE:
        return _needed(table, "factor", table.number("factor", 1, 1e4), "3")
    factor = table.number("factor", -1e6, 1e6)
    return -1.0 if factor is None else factor


def _needed(table: Table, key: str, value: float | None, example: str) -> float:
    if value is None:
        raise table.refused(key, f"{key} is missing", f"add {key} = {example}")
    return value
