"""TLS of an API that others call, by the hub's own CA where its operator has no certificate."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from hypergpu.user.client import Coordinator
from hypergpu.user.client.settings import config_folder
from hypergpu.user.serving.certificate_renewal import CertificateRequest
from hypergpu.user.serving.server import ApiPlace

CA_FILE = "hub-ca.pem"
_PRIVATE = 0o600
_ELSEWHERE = ("192.0.2.1", 9)
"""A documentation address: only the route is looked up."""


@contextmanager
def certified_place(coordinator: Coordinator, place: ApiPlace) -> Iterator[ApiPlace]:
    """The place with a certificate, where others are to call it and it has none.

    The key is made anew, lies in a folder of this user's alone and goes with the block; the CA's
    certificate stays beside the settings file.

    Raises:
        HyperGPUError: The token is no operator's, or the coordinator has no CA.
    """
    if not place.needs_certificate:
        yield place
        return
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hypergpu-api")])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    host = called_host(place.host)
    hosts = list(dict.fromkeys([host, socket.gethostname()]))
    content = request.public_bytes(serialization.Encoding.PEM)
    issued_chain = coordinator.certify_api(content, hosts)
    authority = config_folder() / CA_FILE
    authority.parent.mkdir(parents=True, exist_ok=True)
    authority.write_bytes(issued_chain.authority_pem)
    with tempfile.TemporaryDirectory(prefix="hypergpu-api-") as folder:
        certificate, private_key = Path(folder) / "api.pem", Path(folder) / "api.key"
        certificate.write_bytes(issued_chain.certificate_pem + issued_chain.authority_pem)
        descriptor = os.open(private_key, os.O_CREAT | os.O_WRONLY, _PRIVATE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(
                key.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                )
            )
        yield place._replace(
            certificate=certificate,
            private_key=private_key,
            authority=authority,
            called_host=host,
            renewal=CertificateRequest(content, hosts, issued_chain.expires_unix_s),
        )


def called_host(listen: str) -> str:
    """What callers dial: the stated host, or for all addresses the one that leads to others."""
    if not _is_wildcard(listen):
        return listen
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(_ELSEWHERE)
        return str(probe.getsockname()[0])
    return socket.gethostname()


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False
