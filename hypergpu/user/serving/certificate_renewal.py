"""The API's certificate while it serves: the hub's CA renews its own, an operator's is reread."""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

from hypergpu.clock import unix_s
from hypergpu.errors import HyperGPUError, RemoteFailureError
from hypergpu.user.client.models import ApiCertificate

RENEWAL_S = 30 * 24 * 3600
"""Time before its end at which a certificate of the hub's CA is renewed; it has 90 days."""
LOOK_S = 3600.0
"""Time between two looks, and until a renewal that failed is tried again."""


class Certifier(Protocol):
    """Issues certificates of the hub's CA."""

    async def certify_api(self, request_pem: bytes, hosts: list[str]) -> ApiCertificate:
        """See `hypergpu.user.client.AsyncCoordinator.certify_api`."""
        ...


class CertificateRequest(NamedTuple):
    """What the hub's CA is asked for; the key stays the same."""

    content: bytes
    """PKCS#10, PEM."""
    hosts: list[str]
    expires_unix_s: int
    """End of the certificate that is there."""


class ApiCertificateFiles:
    """The certificate and key that a TLS context presents.

    Args:
        certificate: PEM file, with the CA's behind it.
        private_key: PEM file.
        request: By which it is renewed; None: the operator puts another file in its place.
        tell: Tells people what failed.
    """

    def __init__(
        self,
        certificate: Path,
        private_key: Path,
        request: CertificateRequest | None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._certificate = certificate
        self._private_key = private_key
        self._request = request
        self._tell = tell
        self._loaded_times = self._times()

    def _times(self) -> tuple[int, int]:
        """When the files were written last, in ns."""
        files = (self._certificate, self._private_key)
        one, other = (file.stat().st_mtime_ns for file in files)
        return one, other

    async def keep_good(self, context: ssl.SSLContext, certifier: Certifier) -> NoReturn:
        """Have connections from now on get a certificate that is good, for as long as it runs."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.refresh(context, certifier, unix_s())

    async def refresh(self, context: ssl.SSLContext, certifier: Certifier, now_s: int) -> None:
        """Renew the certificate where it ends soon, and take up files that have changed.

        What fails is told, and the certificate of before stays in use.
        """
        request = self._request
        try:
            if request is not None and request.expires_unix_s - now_s < RENEWAL_S:
                self._request = await self._renew(request, certifier)
            times = self._times()
            if times != self._loaded_times:
                context.load_cert_chain(self._certificate, self._private_key)
                self._loaded_times = times
        except (HyperGPUError, RemoteFailureError, OSError) as error:
            # `ssl.SSLError` is an OSError, too.
            self._tell(f"the API's certificate could not be renewed, and is tried again: {error}")

    async def _renew(self, request: CertificateRequest, certifier: Certifier) -> CertificateRequest:
        chain = await certifier.certify_api(request.content, request.hosts)
        fresh_file = self._certificate.with_suffix(".new")
        fresh_file.write_bytes(chain.certificate_pem + chain.authority_pem)
        fresh_file.replace(self._certificate)
        return request._replace(expires_unix_s=chain.expires_unix_s)
