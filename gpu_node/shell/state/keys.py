"""The node's two keys: the one that is its identity, and the one that its certificate is for."""

import stat
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gpu_node.shell.state.places import Places, write_durably
from hypergpu.ids import NodeId
from hypergpu.refusal import Reason, RefusalError
from hypergpu.signature import IdentityKey


def identity_key(places: Places) -> IdentityKey:
    """The node's secp256k1 key, made on the first start.

    Raises:
        RefusalError: FILE_UNUSABLE, it is damaged, or others can read it.
    """
    path = places.identity
    if not path.exists():
        write_durably(path, IdentityKey.generate().secret.hex().encode() + b"\n")
    _refuse_shared(path)
    try:
        return IdentityKey(bytes.fromhex(path.read_text("ascii").strip()))
    except ValueError as broken:
        detail = f"the identity key {path} is damaged: restore it, or delete it and join again"
        raise RefusalError(Reason.FILE_UNUSABLE, detail) from broken


def _refuse_shared(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        detail = f"others can read the identity key {path} (mode {mode:o}): chmod 600 {path}"
        raise RefusalError(Reason.FILE_UNUSABLE, detail)


def tls_key_pem(places: Places) -> bytes:
    """The P-256 key of the node's TLS connections, made on the first start. PEM."""
    if not places.tls_key.exists():
        pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        write_durably(places.tls_key, pem)
    return places.tls_key.read_bytes()


def certificate_request_pem(places: Places, node: NodeId) -> bytes:
    """A PKCS#10 request for the TLS key, PEM. The name is a courtesy; the issuer sets its own.

    Raises:
        RefusalError: FILE_UNUSABLE, the TLS key is damaged.
    """
    try:
        key = serialization.load_pem_private_key(tls_key_pem(places), password=None)
    except ValueError as broken:
        detail = f"the TLS key {places.tls_key} is damaged: delete it and join again"
        raise RefusalError(Reason.FILE_UNUSABLE, detail) from broken
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        detail = f"the TLS key {places.tls_key} is not of P-256: delete it and join again"
        raise RefusalError(Reason.FILE_UNUSABLE, detail)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)
