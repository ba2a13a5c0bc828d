"""Work that repeats while the coordinator runs: counters, health and speeds of nodes are stored,
and the other coordinators are read.
"""

import asyncio
import time

import structlog

from coordinator.shell.driver.driver import Driver
from coordinator.shell.nodes.connected_nodes import ConnectedNodes
from coordinator.shell.nodes.fleet import Fleet
from coordinator.shell.nodes.fleet_health import MINUTE_S, STORED_A_MINUTE, FleetHealth
from coordinator.shell.nodes.fleet_speeds import FleetSpeeds
from coordinator.shell.store.journal.coordinators import OtherCoordinators
from coordinator.shell.store.journal.records import JournalError
from hypergpu.errors import HyperGPUError

log = structlog.get_logger()
_STORE_S = 5.0


async def keep_others_known(others: OtherCoordinators) -> None:
    """Read every few seconds which other coordinators there are, for ever."""
    while True:
        try:
            await asyncio.to_thread(others.refresh)
        except JournalError as error:
            log.warning("other coordinators are not read", reason=str(error))
        await asyncio.sleep(_STORE_S)


async def keep_node_counts(driver: Driver, nodes: ConnectedNodes) -> None:
    """Store nodes' counters and last contacts every few seconds, for ever."""
    while True:
        await asyncio.sleep(_STORE_S)
        await store_node_counts(driver, nodes)


async def store_node_counts(driver: Driver, nodes: ConnectedNodes) -> None:
    """Store last contacts, and counts since the last time."""
    counts = dict(nodes.counts)
    now_ms = time.time_ns() // 1_000_000
    last_seen_ms = {node: now_ms - (nodes.silent_ms(node) or 0) for node in nodes.streams}
    try:
        await driver.in_writer(driver.journal.record_activity, last_seen_ms, counts)
    except HyperGPUError as error:
        log.warning("counters are not stored yet", reason=str(error))
        return
    for node, stored_counts in counts.items():
        nodes.count(node, accepted=-stored_counts.accepted, rejected=-stored_counts.rejected)


async def keep_health(driver: Driver, fleet: Fleet) -> None:
    """Look at every node's health once a minute and store it, and the speeds, for ever.

    The first look is a minute after the start: nodes need that long to dial in again.
    """
    while True:
        await asyncio.sleep(MINUTE_S)
        health, readings, streams = fleet.health, fleet.readings, fleet.nodes.streams
        if await health.look(streams, readings.by_node()):
            fleet.allocator.review()
        await store_health(driver, health)
        readings.speeds.forget_old()
        await store_speeds(driver, readings.speeds)


async def store_health(driver: Driver, health: FleetHealth, most: int = STORED_A_MINUTE) -> None:
    """Store at most so many records of nodes' health that changed, the longest unstored first."""
    records, removed_nodes = health.records_to_store(most), tuple(health.forgotten)
    try:
        await driver.in_writer(driver.journal.store_health, records, removed_nodes)
    except HyperGPUError as error:
        log.warning("health is not stored yet", reason=str(error))
        return
    health.mark_stored(records, removed_nodes)


async def store_speeds(driver: Driver, speeds: FleetSpeeds, most: int = STORED_A_MINUTE) -> None:
    """Store at most so many records of nodes' speeds that changed, the longest unstored first."""
    records, removed_nodes = speeds.records_to_store(most), tuple(speeds.forgotten)
    try:
        await driver.in_writer(driver.journal.store_speeds, records, removed_nodes)
    except HyperGPUError as error:
        log.warning("speeds are not stored yet", reason=str(error))
        return
    speeds.mark_stored(records, removed_nodes)
