"""The item kind `checksum`: the digest of each item as JSON, by which a whole farm is tried and a
corpus is checked for equal rows. It needs no library, and any two nodes give the same bytes. An
item takes at least the worker's step floor, so that a fast machine plays slow ones.
"""

import time

import msgspec

from gpu_node.shell.worker.farm.bundle_output import BundleCourse, json_output
from gpu_node.shell.worker.farm.chunk_items import TextItem, json_items
from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork, limits_from_environment
from gpu_node.shell.worker.trainer import ShardCallbacks, ShardError
from hypergpu.digests import digest_of
from hypergpu.farm.bundle_results import ItemResult
from hypergpu.farm.bundles import Bundle
from hypergpu.packed_work import unpack_work

_BATCH_ITEMS = 256
_ROUNDS_MOST = 10_000_000


def perform(request: DoWork, callbacks: ShardCallbacks) -> WorkOutput:
    """Do a bundle: see `gpu_node.shell.worker.performers.Perform`."""
    bundle = unpack_work(request.work, request.work.kind, Bundle)
    course = BundleCourse(request, callbacks, bundle.items)
    rounds = _rounds(bundle)
    items = json_items(request, bundle)
    floor_s = limits_from_environment().step_floor_ms / 1000
    batch_items = _BATCH_ITEMS if rounds == 1 and not floor_s else 1
    results: list[ItemResult] = []
    for first in range(0, len(items), batch_items):
        batch = items[first : first + batch_items]
        course.advance(0)
        due_s = time.monotonic() + floor_s * len(batch)
        results += [item_checksum(item, rounds) for item in batch]
        time.sleep(max(0.0, due_s - time.monotonic()))
        course.advance(len(batch))
    return json_output(request, course, results, sum(not result.error for result in results))


def _rounds(bundle: Bundle) -> int:
    rounds = bundle.parameters.get("rounds", 1)
    if not isinstance(rounds, int) or not 0 < rounds <= _ROUNDS_MOST:
        raise ShardError(f"rounds of checksum is {rounds!r}: a whole number of 1 to {_ROUNDS_MOST}")
    return rounds


def item_checksum(item: TextItem, rounds: int) -> ItemResult:
    """The digest of an item's canonical JSON, taken again and again for more work an item."""
    if item.error:
        return ItemResult(error=item.error)
    digest = digest_of(msgspec.json.encode(item.value, order="sorted"))
    for _ in range(rounds - 1):
        digest = digest_of(digest.encode())
    return ItemResult(value=digest)
