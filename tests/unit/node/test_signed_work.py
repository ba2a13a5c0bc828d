"""A node does what a user signed, by a key that it trusts, and refuses each thing that differs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from gpu_node.core.limits import OwnerLimits, owner_limits
from gpu_node.shell.folder.state import StatePaths
from gpu_node.shell.owner.signed_work import SignedWork
from gpu_node.shell.transfer.signed_data import check_signed_data
from hypergpu.assignment import Lease, PackedAssignment
from hypergpu.blobs import BlobRef
from hypergpu.clock import unix_s
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.farm.bundles import Bundle, BundleChunk
from hypergpu.farm.item_chunks import ItemChunk, ItemEncoding, ItemManifest, manifest_bytes
from hypergpu.farm.map_request import MapRequest
from hypergpu.farm.spec_keys import public_bytes, sign_spec, succession
from hypergpu.farm.work_spec import WorkSpec, work_spec
from hypergpu.ids import Address, JobId, Slot
from hypergpu.ledger_terms import Domain, terms_of
from hypergpu.packed_work import pack_work
from hypergpu.signed_spec import SignedSpec
from hypergpu.units import Bytes, Milliseconds
from hypergpu.work_units import WorkUnit

USER = "5e1f00000001"
JOB = JobId("job-00000000000a")
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
BASE = BlobRef(digest_of(b"a base"), Bytes(6))
CHUNKS = [b"1\n2\n3\n", b"4\n5\n"]
MANIFEST = ItemManifest(
    encoding=ItemEncoding.JSONL,
    chunks=tuple(
        ItemChunk(digest_of(each), Bytes(len(each)), each.count(b"\n")) for each in CHUNKS
    ),
)
MANIFEST_BYTES = manifest_bytes(MANIFEST)
MANIFEST_BLOB = BlobRef(digest_of(MANIFEST_BYTES), Bytes(len(MANIFEST_BYTES)))
REQUEST = MapRequest(
    item_kind="embed",
    manifest=MANIFEST_BLOB,
    items=5,
    files={"base": BASE},
    parameters={"prompt": "query: "},
    seed=7,
    bundle_items_most=4,
    lease_limit_ms=Milliseconds(60_000),
)
SPEC = work_spec(REQUEST, USER, unix_s() + 3_600)
BUNDLE = Bundle(
    start=3,
    items=2,
    chunks=(BundleChunk(MANIFEST.chunks[1].blob, 3, 2),),
    manifest=MANIFEST_BLOB,
    files={"base": BASE},
    parameters={"prompt": "query: "},
    seed=7,
    result_bytes_most=Bytes(80_000),
    limit_ms=Milliseconds(60_000),
)
TERMS = terms_of(Address("0x" + "c0" * 20), JOB, Domain(), WorkUnit.ITEMS)


def assignment_of(
    bundle: Bundle = BUNDLE, signed_spec: SignedSpec | None = None, kind: str = "map/embed"
) -> PackedAssignment:
    """A bundle as a node gets it."""
    return PackedAssignment(
        lease=Lease(JOB, 0, 1),
        slot=Slot(0),
        work=pack_work(kind, bundle),
        inputs=bundle.inputs,
        terms=TERMS,
        spec=signed_spec,
    )


SIGNED = sign_spec(KEY, SPEC)
OwnerFolder = Callable[..., SignedWork]


@pytest.fixture
def owner(tmp_path: Path) -> OwnerFolder:
    """A node's check, over one folder, with keys that its owner pins."""

    def check(*keys: Ed25519PrivateKey) -> SignedWork:
        pinned_keys = tuple(public_bytes(key).hex() for key in keys)
        return SignedWork(StatePaths(tmp_path), OwnerLimits(spec_keys=pinned_keys))

    return check


def reason(work: SignedWork, assignment: PackedAssignment) -> str:
    """Why the node does not do it; empty: it does."""
    refusal = work.refusal(assignment)
    assert refusal is None or refusal.number == "OWNER_SPEC"
    return "" if refusal is None else refusal.detail


def test_work_that_is_as_signed_is_done(owner: OwnerFolder) -> None:
    assert reason(owner(), assignment_of(signed_spec=SIGNED)) == ""
    assert reason(owner(KEY), assignment_of(signed_spec=SIGNED)) == ""


def changed_bundle(**changes: Any) -> PackedAssignment:
    """The bundle with something that its user did not sign."""
    return assignment_of(replace(BUNDLE, **changes), SIGNED)


def changed_spec(**changes: Any) -> PackedAssignment:
    """The bundle under another spec of the same key."""
    return assignment_of(signed_spec=sign_spec(KEY, replace(SPEC, **changes)))


def signed_with(**changes: Any) -> PackedAssignment:
    """The bundle under a spec whose bytes were changed on the way."""
    return assignment_of(signed_spec=replace(SIGNED, **changes))


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        (changed_bundle(files={"base": BlobRef(digest_of(b"b"), Bytes(1))}), "base or program"),
        (changed_bundle(files={}), "base or program"),
        (changed_bundle(manifest=None), "its data is not"),
        (changed_bundle(manifest=BASE), "its data is not"),
        (changed_bundle(parameters={"prompt": ""}), "its settings is not"),
        (changed_bundle(seed=8), "its seed is not"),
        (changed_bundle(unit=WorkUnit.TOKENS), "its unit is not"),
        (changed_bundle(start=4), "its items end at 6, and its user signed 5"),
        (changed_bundle(start=0, items=5), "it has 5 items, and its user signed 4"),
        (changed_bundle(limit_ms=60_001), "it may take 60001 ms, and its user signed 60000"),
        (changed_bundle(result_bytes_most=98_305), "98305 bytes, 98304 are signed"),
        (assignment_of(signed_spec=SIGNED, kind="map/score"), "its user signed map/embed"),
        (changed_spec(ends_at_s=unix_s() - 9), "what its user signed ended"),
        (changed_spec(unit=WorkUnit.TOKENS), "counted in items, and its user signed tokens"),
        (
            assignment_of(signed_spec=replace(SIGNED, spec=SIGNED.spec + b"x")),
            "is not that of its key",
        ),
        (signed_with(signature=bytes(64)), "is not that of its key"),
        (signed_with(public_key=b"short"), "is not that of its key"),
        (signed_with(spec=bytes(32_769)), "32768 at most"),
    ],
)
def test_work_that_differs_from_what_was_signed_is_refused_with_the_difference(
    assignment: PackedAssignment, text: str, owner: OwnerFolder
) -> None:
    assert text in reason(owner(), assignment)
    assert text in reason(owner(KEY), assignment)


def test_a_node_that_pins_keys_does_no_other_users_work(owner: OwnerFolder) -> None:
    by_other = assignment_of(signed_spec=sign_spec(OTHER, SPEC))
    assert "which node.toml does not name" in reason(owner(KEY), by_other)
    assert "is signed by no user" in reason(owner(KEY), assignment_of())
    # Users of the version before sign nothing: who pins no key does their work.
    assert reason(owner(), assignment_of()) == ""


def successor_spec(
    signer: Ed25519PrivateKey = KEY, next_key: Ed25519PrivateKey = OTHER, spec: WorkSpec = SPEC
) -> SignedSpec:
    """A spec by a key that another one named."""
    return sign_spec(next_key, spec, (succession(signer, public_bytes(next_key)),))


def test_the_first_key_of_a_user_counts_until_it_names_another(owner: OwnerFolder) -> None:
    assert reason(owner(), assignment_of(signed_spec=SIGNED)) == ""
    stranger = assignment_of(signed_spec=sign_spec(OTHER, SPEC))
    text = reason(owner(), stranger)
    assert "now by another that it did not name" in text
    assert f'spec_keys = ["{public_bytes(OTHER).hex()}"]' in text
    assert reason(owner(), assignment_of(signed_spec=successor_spec())) == ""
    # It has moved on: the older key is worth nothing any more.
    assert "did not name" in reason(owner(), assignment_of(signed_spec=SIGNED))
    elsewhere = sign_spec(OTHER, replace(SPEC, user="5e1f00000002"))
    assert reason(owner(), assignment_of(signed_spec=elsewhere)) == ""


def test_a_key_that_was_not_named_by_the_one_before_is_refused(owner: OwnerFolder) -> None:
    third = Ed25519PrivateKey.from_private_bytes(bytes(range(2, 34)))
    false_line = successor_spec(signer=third)
    false_line = replace(
        false_line,
        successions=(replace(false_line.successions[0], public_key=public_bytes(KEY)),),
    )
    assert "did not name the next one" in reason(owner(), assignment_of(signed_spec=false_line))
    assert "did not name the next one" in reason(owner(KEY), assignment_of(signed_spec=false_line))
    many = replace(SIGNED, successions=successor_spec().successions * 33)
    assert "32 at most" in reason(owner(), assignment_of(signed_spec=many))
    assert reason(owner(KEY), assignment_of(signed_spec=successor_spec())) == ""


def data_conflict(tmp_path: Path, bundle: Bundle) -> str:
    """Reason for which fetched chunks are refused; empty: they are not."""
    assignment = assignment_of(bundle, SIGNED)
    for blob in assignment.inputs:
        content = MANIFEST_BYTES if blob == MANIFEST_BLOB else b""
        (tmp_path / blob.digest).write_bytes(content)
    paths = tuple(tmp_path / blob.digest for blob in assignment.inputs)
    try:
        check_signed_data(assignment, paths)
    except HyperGPUError as error:
        return f"{error.reason.name}: {error.detail}"
    return ""


def test_chunks_that_are_not_of_the_signed_data_are_refused(tmp_path: Path) -> None:
    assert data_conflict(tmp_path, BUNDLE) == ""
    (right,) = BUNDLE.chunks
    for chunk in (
        replace(right, blob=MANIFEST.chunks[0].blob),
        replace(right, start=2),
        replace(right, items=1),
    ):
        text = data_conflict(tmp_path, replace(BUNDLE, chunks=(chunk,)))
        place = f"the chunk at item {chunk.start}"
        assert text == f"OWNER_SPEC: {place} is not of the data that its user signed"
    text = data_conflict(tmp_path, replace(BUNDLE, encoding=ItemEncoding.ARROW))
    assert "encoded in another way" in text


def test_keys_in_node_toml_are_64_hex_digits() -> None:
    key = public_bytes(KEY).hex()
    assert owner_limits({"spec_keys": [key]}, "node.toml").spec_keys == (key,)
    with pytest.raises(ValueError, match="spec_keys"):
        owner_limits({"spec_keys": [key[:-1]]}, "node.toml")
