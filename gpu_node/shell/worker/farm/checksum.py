"""The item kind `checksum`: the digest of each item as JSON, by which a whole farm is tried and a
corpus is checked for equal rows. It needs no library, and any two nodes give the same bytes.
"""

from typing import TYPE_CHECKING, Any

import msgspec

from gpu_node.shell.worker.farm.bundle_items import BundleReader, ResultContent, perform_bundle
from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.bundle_results import ItemResult, json_results
from hypergpu.farm.bundles import Bundle
from hypergpu.farm.item_chunks import ItemEncoding
from hypergpu.farm.map_request import ResultEncoding

if TYPE_CHECKING:
    from gpu_node.shell.worker.trainer import ShardCallbacks

_BATCH_ITEMS = 256
_ROUNDS_MOST = 10_000_000


def perform(request: DoWork, callbacks: "ShardCallbacks") -> WorkOutput:
    """Do a bundle: see `gpu_node.shell.worker.performers.Perform`."""
    return perform_bundle(request, callbacks, _checksums)


def _checksums(bundle: Bundle, reader: BundleReader) -> ResultContent:
    if bundle.encoding is not ItemEncoding.JSONL or bundle.result is not ResultEncoding.JSONL:
        detail = "checksum reads items in JSON lines and gives results in JSON lines"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    rounds = _rounds(bundle)
    results: list[ItemResult] = []
    for line in reader.lines():
        results.append(item_checksum(line, rounds))
        if rounds > 1 or len(results) % _BATCH_ITEMS == 0:
            reader.note_done(len(results))
    failures = sum(bool(result.error) for result in results)
    return ResultContent(json_results(results), failures, bundle.items - failures)


def _rounds(bundle: Bundle) -> int:
    rounds = bundle.parameters.get("rounds", 1)
    if not isinstance(rounds, int) or not 0 < rounds <= _ROUNDS_MOST:
        detail = f"rounds of checksum is {rounds!r}: a whole number of 1 to {_ROUNDS_MOST}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    return rounds


def item_checksum(line: bytes, rounds: int) -> ItemResult:
    """The digest of an item's canonical JSON, taken again and again for more work an item."""
    try:
        item: Any = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return ItemResult(error=f"the item is no JSON: {error}")
    digest = digest_of(msgspec.json.encode(item, order="sorted"))
    for _ in range(rounds - 1):
        digest = digest_of(digest.encode())
    return ItemResult(value=digest)
