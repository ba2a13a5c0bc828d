"""The certificate authority and nodes' signatures."""

import json
import os
import ssl
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from msgspec.structs import replace

from coordinator.shell.nodes.identity.authority import (
    NODE_CERTIFICATE_S,
    SERVER_NAME,
    Authority,
    AuthorityError,
)
from hypergpu.crypto import IdentityKey, JoinClaim, claim_bytes, node_id_of, verify
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, NodeId, TokenId

NOW_S = 1_900_000_000
DAY_S = 24 * 3600
NODE = NodeId("0x" + "a1" * 20)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.open(tmp_path / "identity", NOW_S)


def request(key: CertificateIssuerPrivateKeyTypes, name: str = "somebody else") -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    certificate_request = (
        x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, algorithm)
    )
    return certificate_request.public_bytes(serialization.Encoding.PEM)


def node_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def names(authority: Authority, *hosts: str) -> list[str]:
    identity = authority.server_identity(hosts, NOW_S)
    leaf = x509.load_pem_x509_certificates(identity.chain_pem)[0]
    alternative_names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in alternative_names]


def test_an_authority_is_made_once_and_found_again(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path, NOW_S)
    assert Authority.open(tmp_path, NOW_S + DAY_S).digest == authority.digest


def test_an_authority_is_named_by_the_digest_of_its_der(authority: Authority) -> None:
    certificate = x509.load_pem_x509_certificate(authority.pem)
    assert authority.digest == digest_of(certificate.public_bytes(serialization.Encoding.DER))


def test_only_its_owner_reads_the_key(tmp_path: Path) -> None:
    Authority.open(tmp_path, NOW_S)
    assert (tmp_path / "authority.key").stat().st_mode & 0o777 == 0o600


def test_a_key_that_others_may_read_is_refused_with_the_fix(tmp_path: Path) -> None:
    Authority.open(tmp_path, NOW_S)
    (tmp_path / "authority.key").chmod(0o644)
    with pytest.raises(AuthorityError, match="chmod 600"):
        Authority.open(tmp_path, NOW_S)


def test_a_crash_between_the_key_and_the_certificate_is_mended(tmp_path: Path) -> None:
    Authority.open(tmp_path, NOW_S)
    (tmp_path / "authority.pem").unlink()
    Authority.open(tmp_path, NOW_S)
    assert Authority.open(tmp_path, NOW_S).digest


@pytest.mark.parametrize("damaged", ["authority.key", "authority.pem"])
def test_a_damaged_authority_is_refused_with_the_fix(tmp_path: Path, damaged: str) -> None:
    Authority.open(tmp_path, NOW_S)
    (tmp_path / damaged).write_bytes(b"-----BEGIN")
    with pytest.raises(AuthorityError, match="restore both files from a backup"):
        Authority.open(tmp_path, NOW_S)


def test_the_key_of_another_authority_is_refused(tmp_path: Path) -> None:
    Authority.open(tmp_path / "one", NOW_S)
    Authority.open(tmp_path / "two", NOW_S)
    os.replace(tmp_path / "one" / "authority.key", tmp_path / "two" / "authority.key")  # noqa: PTH105
    with pytest.raises(AuthorityError, match="is not the key of"):
        Authority.open(tmp_path / "two", NOW_S)


def test_the_server_is_known_by_every_way_to_dial_it(authority: Authority) -> None:
    name_list = names(authority, "train.example.org", "192.0.2.7", "[2001:db8::7]", "::", "[::]")
    wanted_names = {"hypergpu-coordinator", "localhost", "127.0.0.1", "::1"}
    assert wanted_names | {"train.example.org", "192.0.2.7", "2001:db8::7"} <= set(name_list)
    assert "::" not in name_list


def test_the_server_presents_its_leaf_and_then_the_authority(authority: Authority) -> None:
    identity = authority.server_identity((), NOW_S)
    leaf, root = x509.load_pem_x509_certificates(identity.chain_pem)
    leaf.verify_directly_issued_by(root)
    assert digest_of(root.public_bytes(serialization.Encoding.DER)) == authority.digest


def test_a_node_certificate_carries_the_nodes_id_whatever_was_asked(authority: Authority) -> None:
    key = node_key()
    certificate = authority.issue(NODE, request(key, "0x" + "ff" * 20), NOW_S)
    leaf = x509.load_pem_x509_certificate(certificate.pem)
    assert [name.value for name in leaf.subject] == [NODE]
    assert leaf.public_key() == key.public_key()


def test_a_node_certificate_lasts_a_day_and_a_clocks_error(authority: Authority) -> None:
    certificate = authority.issue(NODE, request(node_key()), NOW_S)
    leaf = x509.load_pem_x509_certificate(certificate.pem)
    assert certificate.expires_s == NOW_S + NODE_CERTIFICATE_S
    assert leaf.not_valid_before_utc.timestamp() <= NOW_S - DAY_S
    assert leaf.not_valid_after_utc.timestamp() == NOW_S + 2 * DAY_S


@pytest.mark.parametrize("off_s", [-DAY_S, DAY_S])
def test_a_clock_that_is_a_day_off_accepts_every_certificate_as_long_as_it_lasts(
    authority: Authority, off_s: int
) -> None:
    node = authority.issue(NODE, request(node_key()), NOW_S).pem
    presented_chain = authority.server_identity((), NOW_S).chain_pem
    certificates = [
        *x509.load_pem_x509_certificates(presented_chain),
        x509.load_pem_x509_certificate(node),
    ]
    for certificate in certificates:
        assert certificate.not_valid_before_utc.timestamp() <= NOW_S + off_s
        assert NOW_S + NODE_CERTIFICATE_S + off_s <= certificate.not_valid_after_utc.timestamp()


@pytest.mark.parametrize(
    ("pem", "problem"),
    [
        (b"", "not a PKCS#10 request"),
        (b"x" * 9000, "at most 8192 are read"),
        (request(ed25519.Ed25519PrivateKey.generate()), "not of P-256"),
        (request(ec.generate_private_key(ec.SECP384R1())), "not of P-256"),
    ],
)
def test_other_requests_are_refused(authority: Authority, pem: bytes, problem: str) -> None:
    with pytest.raises(HyperGPUError, match=problem) as failure:
        authority.issue(NODE, pem, NOW_S)
    assert failure.value.reason is Reason.REQUEST_INVALID


def test_a_request_that_another_key_signed_is_refused(authority: Authority) -> None:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    mine = builder.sign(node_key(), hashes.SHA256())
    other = builder.sign(node_key(), hashes.SHA256())
    point = serialization.PublicFormat.UncompressedPoint
    swapped_bytes = mine.public_bytes(serialization.Encoding.DER).replace(
        mine.public_key().public_bytes(serialization.Encoding.X962, point),
        other.public_key().public_bytes(serialization.Encoding.X962, point),
    )
    forged_request = x509.load_der_x509_csr(swapped_bytes).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(HyperGPUError, match="not signed by its own key"):
        authority.issue(NODE, forged_request, NOW_S)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLObject:
    """Shake hands in memory; the server's end."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server_end = server.wrap_bio(to_server, to_client, server_side=True)
    client_end = client.wrap_bio(to_client, to_server, server_hostname="hypergpu-coordinator")
    waiting_ends = [client_end, server_end]
    for _ in range(10):
        for end in tuple(waiting_ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting_ends.remove(end)
    assert not waiting_ends
    return server_end


def contexts(authority: Authority, folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    now_s = int(folder.stat().st_mtime)
    identity = authority.server_identity((), now_s)
    (folder / "server.pem").write_bytes(identity.private_key_pem + identity.chain_pem)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.pem")
    server.load_verify_locations(cadata=authority.pem.decode())
    server.verify_mode = ssl.CERT_REQUIRED
    client = ssl.create_default_context(cadata=authority.pem.decode())
    return server, client


def certify(client: ssl.SSLContext, authority: Authority, folder: Path) -> None:
    key = node_key()
    certificate = authority.issue(NODE, request(key), int(folder.stat().st_mtime))
    key_pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "node.pem").write_bytes(key_pem + certificate.pem)
    client.load_cert_chain(folder / "node.pem")


def test_a_certified_node_and_the_server_recognise_each_other(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path / "identity", int(tmp_path.stat().st_mtime))
    server, client = contexts(authority, tmp_path)
    certify(client, authority, tmp_path)
    peer = handshake(server, client).getpeercert()
    assert peer is not None
    assert peer["subject"] == ((("commonName", NODE),),)


def test_a_node_of_another_authority_is_turned_away(tmp_path: Path) -> None:
    now_s = int(tmp_path.stat().st_mtime)
    authority = Authority.open(tmp_path / "identity", now_s)
    server, client = contexts(authority, tmp_path)
    certify(client, Authority.open(tmp_path / "stranger", now_s), tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client)


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


def test_an_api_is_certified_for_its_hosts_and_never_as_the_coordinator(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path, NOW_S)
    hosts = ["192.168.1.5", "hub.example"]
    api_certificate = authority.issue_to_api("api", request(node_key()), hosts, NOW_S)
    leaf = x509.load_pem_x509_certificate(api_certificate.pem)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    dns_names = names.get_values_for_type(x509.DNSName)
    assert dns_names == ["localhost", "hub.example"]
    assert SERVER_NAME not in dns_names
    usages = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usages) == [ExtendedKeyUsageOID.SERVER_AUTH]
    for name in (SERVER_NAME, f"{SERVER_NAME.upper()}."):
        with pytest.raises(HyperGPUError, match="coordinator's name alone"):
            authority.issue_to_api("api", request(node_key()), [name], NOW_S)
