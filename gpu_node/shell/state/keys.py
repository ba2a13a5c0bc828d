"""The node's two keys: the one that is its identity, and the one that its certificate is for."""

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gpu_node.shell.state.paths import StatePaths
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.files import write_durably
from hypergpu.ids import NodeId
from hypergpu.keys.keyfile import passphrase_beside, stored_secret
from hypergpu.keys.passphrase import Passphrase
from hypergpu.keys.signature import IdentityKey


def identity_key(paths: StatePaths, passphrase: Passphrase | None = None) -> IdentityKey:
    """The node's secp256k1 key, made on the first start. It lies there encrypted.

    Args:
        paths: The node's state folder.
        passphrase: The key's; None: one that is made for it and kept next to the state folder, so
            that the daemon starts without anybody's doing and a copy of the folder opens nothing.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the key or its passphrase is damaged or missing, the
            passphrase is another one, or others can read either.
    """
    if passphrase is None:
        passphrase = passphrase_beside(paths.root, paths.identity)
    return IdentityKey(stored_secret(paths.identity, passphrase))


def tls_key_pem(paths: StatePaths) -> bytes:
    """The P-256 key of the node's TLS connections, made on the first start. PEM."""
    if not paths.tls_key.exists():
        pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        write_durably(paths.tls_key, pem)
    return paths.tls_key.read_bytes()


def certificate_request_pem(paths: StatePaths, node: NodeId) -> bytes:
    """A PKCS#10 request for the TLS key, PEM. The name is a courtesy; the issuer sets its own.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the TLS key is damaged.
    """
    try:
        key = serialization.load_pem_private_key(tls_key_pem(paths), password=None)
    except ValueError as broken:
        detail = f"the TLS key {paths.tls_key} is damaged: delete it and join again"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        detail = f"the TLS key {paths.tls_key} is not of P-256: delete it and join again"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)
