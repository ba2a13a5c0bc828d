import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.ids import Digest, NodeId, TokenId
from hypergpu.keys.signature import (
    IdentityKey,
    JoinClaim,
    claim_bytes,
    node_id_of,
    verify,
)

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "vectors" / "signature.json").read_text()
)
KEY = IdentityKey(bytes.fromhex(VECTORS["secret"]))
STRANGER = IdentityKey(bytes(31) + b"\x07")
ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
JOIN = JoinClaim(TokenId("0123456789ab"), digest_of(b"certificate request"))


def vector_claim(vector: dict[str, Any]) -> JoinClaim:
    return msgspec.convert(vector["claim"], JoinClaim)


def test_a_node_id_is_the_ethereum_address_of_its_key() -> None:
    # A key that every Ethereum development chain prints at its start.
    assert KEY.node_id == "0xf39fd6e51aad88f6f4ce6ab8827279cfffb92266"
    assert node_id_of(bytes.fromhex(VECTORS["public_key"])) == VECTORS["node"]


@pytest.mark.parametrize("vector", VECTORS["claims"], ids=lambda vector: vector["name"])
def test_claims_have_the_bytes_and_signatures_they_always_had(vector: dict[str, Any]) -> None:
    claim = vector_claim(vector)
    assert claim_bytes(claim).hex() == vector["bytes"]
    assert KEY.sign(claim).hex() == vector["signature"]
    assert verify(KEY.node_id, claim, bytes.fromhex(vector["signature"]))


@pytest.mark.parametrize(
    "altered",
    [
        replace(JOIN, token_id=TokenId("0123456789ac")),
        replace(JOIN, request_digest=digest_of(b"another request")),
    ],
)
def test_no_field_of_a_join_can_be_altered(altered: JoinClaim) -> None:
    assert not verify(KEY.node_id, altered, KEY.sign(JOIN))


def test_a_strangers_signature_is_refused() -> None:
    assert not verify(KEY.node_id, JOIN, STRANGER.sign(JOIN))


def test_the_same_signature_in_its_other_form_is_refused() -> None:
    signature = KEY.sign(JOIN)
    high_s = ORDER - int.from_bytes(signature[32:64], "big")
    other = signature[:32] + high_s.to_bytes(32, "big") + bytes([signature[64] ^ 1])
    assert not verify(KEY.node_id, JOIN, other)


@pytest.mark.parametrize("signature", [b"", bytes(64), bytes(65), b"\xff" * 65, bytes(66)])
def test_bytes_that_are_no_signature_are_refused(signature: bytes) -> None:
    assert not verify(KEY.node_id, JOIN, signature)


@pytest.mark.parametrize("digest", ["no digest", "ab"])
def test_a_claim_that_has_no_bytes_is_refused(digest: str) -> None:
    assert not verify(KEY.node_id, replace(JOIN, request_digest=Digest(digest)), KEY.sign(JOIN))


def test_a_node_id_with_capitals_is_nobodys() -> None:
    assert not verify(NodeId(KEY.node_id.upper()), JOIN, KEY.sign(JOIN))


def test_a_key_comes_back_from_its_secret() -> None:
    key = IdentityKey.generate()
    assert IdentityKey(key.secret).node_id == key.node_id


@pytest.mark.parametrize("secret", [b"", bytes(32), b"\xff" * 32, b"\x01" * 33])
def test_a_secret_outside_the_group_is_refused(secret: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- the curve library's own words
        IdentityKey(secret)


@pytest.mark.parametrize("public_key", [b"", bytes(64), b"\x01" * 64, b"\x01" * 65])
def test_a_public_key_off_the_curve_is_refused(public_key: bytes) -> None:
    with pytest.raises(HyperGPUError, match="not an uncompressed secp256k1 point"):
        node_id_of(public_key)


def test_no_representation_shows_the_secret() -> None:
    assert KEY.secret.hex() not in repr(KEY)
