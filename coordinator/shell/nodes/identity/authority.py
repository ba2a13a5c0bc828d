"""The coordinator's own certificate authority, trusted by its digest alone, and its signing key.
Of a certificate request nothing but the key is taken. Certificates begin two days back and a
node's end a day late, so that a clock that is off by a day harms nobody.
"""

import datetime as dt
import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path

import msgspec
from blake3 import blake3
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hypergpu.crypto import IdentityKey
from hypergpu.digests import digest_of
from hypergpu.durable import write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, NodeId
from hypergpu.keys import passphrase_beside, passphrase_of_file, stored_secret

MAX_REQUEST_BYTES = 8192


def certificate_request(pem: bytes) -> ec.EllipticCurvePublicKey:
    """The key that asks to be certified.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is too large, malformed, not signed by its own key, or
            not of P-256.
    """
    if len(pem) > MAX_REQUEST_BYTES:
        raise _invalid(f"it has {len(pem)} bytes, at most {MAX_REQUEST_BYTES} are read")
    try:
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
        is_signed = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm):
        raise _invalid("it is not a PKCS#10 request in PEM") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _invalid("its key is not of P-256")
    if not is_signed:
        raise _invalid("it is not signed by its own key")
    return key


def _invalid(why: str) -> HyperGPUError:
    return HyperGPUError(Reason.REQUEST_INVALID, f"the certificate request cannot be used: {why}")


SERVER_NAME = "hypergpu-coordinator"
NODE_CERTIFICATE_S = 24 * 3600
GATEWAY_CERTIFICATE_S = 24 * 3600
API_CERTIFICATE_S = 90 * 24 * 3600
_AUTHORITY_S = 10 * 365 * 24 * 3600
_SERVER_S = 825 * 24 * 3600
_BACKDATED_S = 2 * 24 * 3600
_SLACK_S = 24 * 3600
_KEY_FILE = "authority.key"
_CERTIFICATE_FILE = "authority.pem"


class AuthorityError(Exception):
    """The authority's files cannot be used. The text says which and how to mend it."""


class ServerIdentity(msgspec.Struct, frozen=True):
    """What a TLS listener presents."""

    private_key_pem: bytes
    chain_pem: bytes
    """Leaf, then authority: nodes hash the authority before they trust it."""


class IssuedCertificate(msgspec.Struct, frozen=True):
    """A certificate for a node or a gateway."""

    pem: bytes
    expires_s: int


class Authority:
    """Signs the coordinator's server certificate and the nodes' short-lived ones."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        self.pem = certificate.public_bytes(serialization.Encoding.PEM)
        self.digest: Digest = digest_of(certificate.public_bytes(serialization.Encoding.DER))

    @classmethod
    def open(cls, folder: Path, now_s: int) -> "Authority":
        """Load the authority, or make it when the folder holds none.

        Raises:
            AuthorityError: the files are damaged, do not belong together, or others may read
                the key.
        """
        key_path, certificate_path = folder / _KEY_FILE, folder / _CERTIFICATE_FILE
        if not certificate_path.exists():
            # The certificate is written last: without it no token was ever handed out.
            _make(key_path, certificate_path, now_s)
        if key_path.exists() and key_path.stat().st_mode & 0o077:
            raise AuthorityError(f"others may read {key_path}: run chmod 600 on it")
        try:
            key = serialization.load_pem_private_key(key_path.read_bytes(), None)
            certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        except (OSError, ValueError) as error:
            raise AuthorityError(
                f"the authority in {folder} cannot be read ({error}): restore both files from a "
                "backup, or remove both, after which every node and user needs a new token"
            ) from error
        is_pair = key.public_key() == certificate.public_key()
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not is_pair:
            raise AuthorityError(f"{key_path} is not the key of {certificate_path}: restore both")
        return cls(key, certificate)

    def server_identity(self, hosts: Iterable[str], now_s: int) -> ServerIdentity:
        """A fresh key and certificate for the listeners; it never touches the disk.

        Args:
            hosts: Names and addresses that nodes and users dial; wildcards stand for nothing.
            now_s: Unix seconds.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = _alternative_names(hosts)
        builder = _builder(SERVER_NAME, key.public_key(), now_s, _SERVER_S)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        leaf = self._sign(builder, ExtendedKeyUsageOID.SERVER_AUTH)
        leaf_pem = leaf.public_bytes(serialization.Encoding.PEM)
        return ServerIdentity(_key_pem(key), leaf_pem + self.pem)

    def issue(self, node: NodeId, request_pem: bytes, now_s: int) -> IssuedCertificate:
        """Certify the TLS key in a node's request for 24 hours, under the node's id alone.

        Nothing but the key is taken from the request.

        Raises:
            HyperGPUError: REQUEST_INVALID, the request is malformed, not signed by its own key, or
                of another kind than P-256.
        """
        public_key = certificate_request(request_pem)
        builder = _builder(node, public_key, now_s, NODE_CERTIFICATE_S + _SLACK_S)
        leaf = self._sign(builder, ExtendedKeyUsageOID.CLIENT_AUTH)
        pem = leaf.public_bytes(serialization.Encoding.PEM)
        return IssuedCertificate(pem, now_s + NODE_CERTIFICATE_S)

    def issue_to_gateway(
        self, name: str, request_pem: bytes, hosts: Iterable[str], now_s: int
    ) -> IssuedCertificate:
        """Certify the TLS key in a gateway's request: nodes take it for the coordinator.

        Raises:
            HyperGPUError: REQUEST_INVALID, as `issue`.
        """
        public_key = certificate_request(request_pem)
        builder = _builder(name, public_key, now_s, GATEWAY_CERTIFICATE_S + _SLACK_S)
        names = x509.SubjectAlternativeName(_alternative_names(hosts))
        leaf = self._sign(
            builder.add_extension(names, critical=False),
            ExtendedKeyUsageOID.SERVER_AUTH,
            ExtendedKeyUsageOID.CLIENT_AUTH,
        )
        pem = leaf.public_bytes(serialization.Encoding.PEM)
        return IssuedCertificate(pem, now_s + GATEWAY_CERTIFICATE_S)

    def issue_to_api(
        self, name: str, request_pem: bytes, hosts: Iterable[str], now_s: int
    ) -> IssuedCertificate:
        """Certify the TLS key of an API of served models, which nobody takes for the coordinator.

        Raises:
            HyperGPUError: REQUEST_INVALID, it asks for the coordinator's name, or as `issue`.
        """
        host_names = [host for host in hosts if host]
        if SERVER_NAME in {host.lower().rstrip(".") for host in host_names}:
            detail = f"{SERVER_NAME} is the coordinator's name alone"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix="name another host")
        public_key = certificate_request(request_pem)
        names = x509.SubjectAlternativeName(_alternative_names(host_names, ("localhost",)))
        builder = _builder(name, public_key, now_s, API_CERTIFICATE_S)
        leaf = self._sign(
            builder.add_extension(names, critical=False), ExtendedKeyUsageOID.SERVER_AUTH
        )
        pem = leaf.public_bytes(serialization.Encoding.PEM)
        return IssuedCertificate(pem, now_s + API_CERTIFICATE_S)

    def derived_secret(self, context: str) -> bytes:
        """32 bytes that follow from the authority's key, for one purpose."""
        key_der = self._key.private_bytes(
            serialization.Encoding.DER,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return blake3(key_der, derive_key_context=context).digest()

    def _sign(
        self, builder: x509.CertificateBuilder, *usages: x509.ObjectIdentifier
    ) -> x509.Certificate:
        issuer = self._key.public_key()
        return (
            builder.issuer_name(self._certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(is_authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )


def _make(key_path: Path, certificate_path: Path, now_s: int) -> None:
    key_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder("hypergpu authority", key.public_key(), now_s, _AUTHORITY_S)
    certificate = (
        builder.issuer_name(_name("hypergpu authority"))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(is_authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_durably(key_path, _key_pem(key))
    write_durably(certificate_path, certificate.public_bytes(serialization.Encoding.PEM))


def _builder(
    name: str, public_key: ec.EllipticCurvePublicKey, now_s: int, lifetime_s: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_utc(now_s - _BACKDATED_S))
        .not_valid_after(_utc(now_s + lifetime_s))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _utc(unix_s: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(unix_s, dt.UTC)


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )


def _own_names() -> tuple[str, ...]:
    return (SERVER_NAME, "localhost", "127.0.0.1", "::1", socket.gethostname())


def _alternative_names(
    hosts: Iterable[str], own_names: Iterable[str] | None = None
) -> list[x509.GeneralName]:
    host_names = dict.fromkeys([*(_own_names() if own_names is None else own_names), *hosts])
    names: list[x509.GeneralName] = []
    for host in host_names:
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            if host and host.isascii():
                names.append(x509.DNSName(host))
        else:
            if not address.is_unspecified:
                names.append(x509.IPAddress(address))
    return names


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


KEY_FILE = Path("identity/coordinator.key")


def coordinator_key(data_dir: Path, passphrase_file: Path | None = None) -> IdentityKey:
    """The key in a coordinator's folder, made on the first start and stored encrypted. Blocks.

    Args:
        data_dir: The coordinator's folder.
        passphrase_file: Holds the key's passphrase; None: one that is made for it and kept beside
            the folder.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the key or its passphrase is damaged or missing, or the
            passphrase is another one, or others can read either.
    """
    path = data_dir / KEY_FILE
    passphrase = (
        passphrase_beside(data_dir, path)
        if passphrase_file is None
        else passphrase_of_file(passphrase_file)
    )
    return IdentityKey(stored_secret(path, passphrase))
