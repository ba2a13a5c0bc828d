"""What the user of a farm job signs of its work, and whether a bundle keeps to it. Pure: keys and
signatures are in `hypergpu.farm.spec_keys`.

A node that is given a bundle with a signed spec does nothing that the user did not order: another
kind, base, data, setting, unit or larger limits than signed are refused with what differs.
"""

from collections.abc import Mapping

import msgspec

from hypergpu.farm.bundles import Bundle
from hypergpu.farm.item_chunks import ItemManifest
from hypergpu.farm.map_request import MapRequest, ParameterValue
from hypergpu.ids import Digest
from hypergpu.units import Bytes, Milliseconds, Wei
from hypergpu.work_units import WorkUnit

RESULT_BASE_BYTES = 65_536
"""Size of the head of a result's file at most."""


class WorkLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that the work may take; 0 is no limit where the request has none."""

    bundle_items_most: int
    lease_limit_ms: Milliseconds
    units_per_item_most: int
    result_bytes_per_item_most: int
    nodes_max: int


class WorkSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A user's order."""

    user: str
    """Id of the token that orders."""
    kind: str
    """Kind of packed work, such as ``map/embed``."""
    version: int
    items: int
    manifest: Digest
    """Digest of the manifest of the data."""
    files: dict[str, Digest]
    """Digests of base and program, by name."""
    parameters: dict[str, ParameterValue]
    seed: int
    unit: WorkUnit
    unit_price: Wei
    budget: Wei
    limits: WorkLimits
    ends_at_s: int
    """Unix time from which nobody may work under it."""


def work_spec(request: MapRequest, user: str, ends_at_s: int) -> WorkSpec:
    """The spec of a request."""
    return WorkSpec(
        user=user,
        kind=request.work_kind,
        version=request.item_kind_version,
        items=request.items,
        manifest=request.manifest.digest,
        files={name: blob.digest for name, blob in sorted(request.files.items())},
        parameters=request.parameters,
        seed=request.seed,
        unit=request.unit,
        unit_price=request.unit_price,
        budget=request.budget,
        limits=WorkLimits(
            bundle_items_most=request.bundle_items_most,
            lease_limit_ms=request.lease_limit_ms,
            units_per_item_most=request.units_per_item_most,
            result_bytes_per_item_most=request.result_bytes_per_item_most,
            nodes_max=request.nodes_max,
        ),
        ends_at_s=ends_at_s,
    )


def request_conflict(spec: WorkSpec, request: MapRequest, user: str, now_s: int) -> str:
    """Why a request is not what its user signed; empty: it is."""
    if now_s >= spec.ends_at_s:
        return f"the signed spec ended {now_s - spec.ends_at_s} s ago"
    wanted_spec = work_spec(request, user, spec.ends_at_s)
    names = (name for name in WorkSpec.__struct_fields__)
    difference = next(
        (name for name in names if getattr(spec, name) != getattr(wanted_spec, name)), ""
    )
    return f"the signed spec has another {difference} than the request" if difference else ""


def bundle_conflict(spec: WorkSpec, kind: str, bundle: Bundle, now_s: int) -> str:
    """Why a bundle is not of the work that its user signed; empty: it is.

    Args:
        spec: Its signature was checked.
        kind: Kind of the packed work.
        bundle: As the coordinator sent it.
        now_s: Unix time.
    """
    if now_s >= spec.ends_at_s:
        return f"what its user signed ended {now_s - spec.ends_at_s} s ago"
    if kind != spec.kind:
        return f"it is work of kind {kind}, and its user signed {spec.kind}"
    values = {
        "base or program": (_digests(bundle), dict(spec.files)),
        "data": (bundle.manifest and bundle.manifest.digest, spec.manifest),
        "settings": (bundle.parameters, spec.parameters),
        "seed": (bundle.seed, spec.seed),
        "unit": (bundle.unit, spec.unit),
    }
    for name, (given_value, stated_value) in values.items():
        if given_value != stated_value:
            return f"its {name} is not what its user signed"
    return _limit_conflict(spec, bundle)


def _digests(bundle: Bundle) -> Mapping[str, Digest]:
    return {name: blob.digest for name, blob in bundle.files.items()}


def _limit_conflict(spec: WorkSpec, bundle: Bundle) -> str:
    limits, last = spec.limits, bundle.start + bundle.items
    if bundle.start < 0 or bundle.items < 1 or last > spec.items:
        return f"its items end at {last}, and its user signed {spec.items}"
    if limits.bundle_items_most and bundle.items > limits.bundle_items_most:
        return f"it has {bundle.items} items, and its user signed {limits.bundle_items_most}"
    if bundle.limit_ms > limits.lease_limit_ms:
        return f"it may take {bundle.limit_ms} ms, and its user signed {limits.lease_limit_ms}"
    most_bytes = Bytes(RESULT_BASE_BYTES + bundle.items * limits.result_bytes_per_item_most)
    if bundle.result_bytes_most > most_bytes:
        return f"its result may have {bundle.result_bytes_most} bytes, {most_bytes} are signed"
    return ""


def chunk_conflict(manifest: ItemManifest, bundle: Bundle) -> str:
    """Why a bundle's chunks are not those of its manifest; empty: they are.

    Args:
        manifest: Read from the blob whose digest is signed.
        bundle: As the coordinator sent it.
    """
    if manifest.encoding is not bundle.encoding:
        return "its chunks are encoded in another way than the data that its user signed"
    places: dict[int, tuple[Digest, int]] = {}
    start = 0
    for chunk in manifest.chunks:
        places[start] = chunk.digest, chunk.items
        start += chunk.items
    for piece in bundle.chunks:
        if places.get(piece.start) != (piece.blob.digest, piece.items):
            return f"the chunk at item {piece.start} is not of the data that its user signed"
    return ""
