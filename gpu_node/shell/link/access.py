"""The node's access to its coordinator: the join, and the certificate with its renewal."""

import asyncio
import ssl

import grpc
import msgspec
import structlog
from cryptography import x509

from gpu_node.shell.folder.state import (
    JoinedCoordinator,
    StatePaths,
    certificate_request_pem,
    load_coordinator,
    save_coordinator,
    tls_key_pem,
)
from gpu_node.shell.link.calls import (
    NODE_KEY,
    Calls,
    Metadata,
    reject_other_version,
    version_message,
)
from gpu_node.shell.link.channel import TlsCredentials, describe_error, open_channel, rejection_in
from gpu_node.shell.link.route import BbrRoute
from hypergpu.clock import unix_ms
from hypergpu.crypto import IdentityKey, JoinClaim
from hypergpu.digests import digest_of
from hypergpu.durable import write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.protocol import PROTOCOL_ENTRY
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2
from hypergpu.wire.authority import fetch_authority
from hypergpu.wire.bulk import BulkClient, BulkRates, RateLimit, client_context
from hypergpu.wire.congestion import BBR
from hypergpu.wire.credentials import Role, Token, split_address

log = structlog.get_logger()

_LIFE_MIN_S = 3600


class Access:
    """Address and certificates of one node, and the calls made with them."""

    def __init__(
        self,
        paths: StatePaths,
        identity: IdentityKey,
        *,
        timeout_ms: Milliseconds,
        congestion_control: str = "",
        rates: BulkRates | None = None,
    ) -> None:
        """``congestion_control`` is wanted for the route to the coordinator, if any is."""
        self._rates = rates
        self._paths = paths
        self._identity = identity
        self._timeout_ms = timeout_ms
        self._route = BbrRoute() if congestion_control == BBR else None
        self._dials = 0
        """Dials since the last welcome: each tries the next coordinator."""

    @property
    def upload_rate(self) -> RateLimit:
        """The owner's limit of what the node sends."""
        return RateLimit() if self._rates is None else self._rates.up

    @property
    def timeout_s(self) -> float:
        """Time limit of a small call."""
        return self._timeout_ms / 1000

    @property
    def is_joined(self) -> bool:
        """Whether the node can dial without a token."""
        return load_coordinator(self._paths) is not None

    async def join(self, token: Token, capabilities: node_pb2.Capabilities) -> JoinedCoordinator:
        """Trade a token for a certificate at the first address that answers.

        The CA that the address presents is checked against the token before the secret is sent.

        Raises:
            HyperGPUError: COORDINATOR_UNREACHABLE when no address answers, AUTHORITY_MISMATCH when
                another CA does, ROLE_FORBIDDEN for another role's token, or the coordinator's
                rejection.
        """
        if token.role is not Role.NODE:
            detail = f"the token is for a {token.role.value}: a node joins with a node's token"
            raise HyperGPUError(Reason.ROLE_FORBIDDEN, detail)
        failures: list[str] = []
        for address in token.addresses:
            try:
                return await self._join_at(address, token, capabilities)
            except HyperGPUError as error:
                if error.reason is not Reason.COORDINATOR_UNREACHABLE:
                    raise
                failures.append(error.detail)
        raise HyperGPUError(Reason.COORDINATOR_UNREACHABLE, "; ".join(failures))

    async def _join_at(
        self, address: str, token: Token, capabilities: node_pb2.Capabilities
    ) -> JoinedCoordinator:
        authority = None
        if token.authority:
            authority = await asyncio.to_thread(
                fetch_authority, address, token.authority, timeout_s=self.timeout_s
            )
        credentials = None if authority is None else TlsCredentials(authority)
        async with open_channel(address, credentials) as channel:
            request = await asyncio.to_thread(self._join_request, token, capabilities)
            try:
                bulk = BulkClient("", None)
                calls = Calls(channel, (PROTOCOL_ENTRY,), self._timeout_ms, bulk)
                response = await calls.join(request)
            except grpc.aio.AioRpcError as error:
                detail = f"{address}: {describe_error(error)}"
                unreachable = HyperGPUError(Reason.COORDINATOR_UNREACHABLE, detail)
                raise rejection_in(error) or unreachable from error
        reject_other_version(response.version)
        return await asyncio.to_thread(self._save_join, address, authority, response)

    def _join_request(
        self, token: Token, capabilities: node_pb2.Capabilities
    ) -> node_pb2.JoinRequest:
        request = certificate_request_pem(self._paths, self._identity.node_id)
        return node_pb2.JoinRequest(
            version=version_message(),
            token_id=token.id,
            token_secret=token.secret,
            public_key=self._identity.public_key,
            certificate_request=request,
            capabilities=capabilities,
            signature=self._identity.sign(JoinClaim(token.id, digest_of(request))),
        )

    def _save_join(
        self, address: str, authority: bytes | None, response: node_pb2.JoinResponse
    ) -> JoinedCoordinator:
        if response.node_id != self._identity.node_id:
            detail = f"{address} took this node for {response.node_id[:64]!r}"
            raise HyperGPUError(Reason.SIGNATURE_INVALID, detail)
        host, _ = split_address(address)
        host_text = f"[{host}]" if ":" in host else host
        coordinator = JoinedCoordinator(
            address=f"{host_text}:{response.node_port}",
            bulk_port=response.bulk_port,
            others=tuple(response.coordinators),
            is_plaintext=authority is None,
            certificate_life_s=_life_s(response.certificate_expires_unix_s),
        )
        if authority is not None:
            write_durably(self._paths.authority, authority)
            write_durably(self._paths.certificate, response.certificate)
        save_coordinator(self._paths, coordinator)
        return coordinator

    @property
    def coordinator_address(self) -> tuple[str, int]:
        """Host and port of the coordinator's listener for nodes. Reads a small file.

        Raises:
            HyperGPUError: NODE_NOT_JOINED, or FILE_UNUSABLE.
        """
        return split_address(self._coordinator().address)

    async def prepare_route(self) -> None:
        """Set the congestion control of the route before a dial, where one is wanted. Reads a
        small file then.

        Raises:
            HyperGPUError: NODE_NOT_JOINED, or FILE_UNUSABLE.
        """
        if self._route is not None:
            await asyncio.to_thread(self._route.set_up, *self.coordinator_address)

    def restore_route(self) -> None:
        """Remove the route with its congestion control, for good. Blocks."""
        if self._route is not None:
            self._route.close()

    @property
    def coordinators(self) -> int:
        """How many coordinators there are to dial. Reads a small file."""
        return 1 + len(self._coordinator().others)

    def note_welcome(self, address: str, others: tuple[str, ...]) -> None:
        """Dial this coordinator first from now on, and then the others. May write a small file."""
        self._dials = 0
        before = self._coordinator()
        after = msgspec.structs.replace(before, address=address, others=others)
        if after != before:
            save_coordinator(self._paths, after)

    def open_calls(self) -> Calls:
        """Calls over a fresh channel with the newest certificate, each time to the next
        coordinator. Reads small files.

        Raises:
            HyperGPUError: NODE_NOT_JOINED, or FILE_UNUSABLE.
        """
        coordinator = self._coordinator()
        addresses = coordinator.address, *coordinator.others
        address = addresses[self._dials % len(addresses)]
        self._dials += 1
        channel = open_channel(address, self._credentials(coordinator))
        metadata: Metadata = (PROTOCOL_ENTRY,)
        if coordinator.is_plaintext:
            # Without TLS the node names itself, which is accepted on loopback only.
            metadata = (PROTOCOL_ENTRY, (NODE_KEY, self._identity.node_id))
        host, _ = split_address(address)
        context = None if coordinator.is_plaintext else self._bulk_context
        bulk = BulkClient(host, context, self._rates)
        calls = Calls(channel, metadata, self._timeout_ms, bulk)
        calls.address = address
        return calls

    def _bulk_context(self) -> ssl.SSLContext:
        """TLS for bulk with the newest certificate. Reads small files."""
        context = client_context(self._paths.authority.read_text("ascii"))
        context.load_cert_chain(self._paths.certificate, self._paths.tls_key)
        return context

    def expiry_reason(self) -> str:
        """Why the certificate admits the node no more, by this machine's clock; empty: it does."""
        if self._coordinator().is_plaintext:
            return ""
        certificate = x509.load_pem_x509_certificate(self._paths.certificate.read_bytes())
        if certificate.not_valid_after_utc.timestamp() > unix_ms() / 1000:
            return ""
        return (
            "the certificate ran out while the node was away:"
            " join again with a fresh token: hypergpu-node join --token-file FILE"
        )

    def renewal_due_s(self) -> float | None:
        """Seconds until two thirds of the certificate's life are over; None without one.

        Counted from when it was written here: the coordinator's clock does not matter.
        """
        coordinator = self._coordinator()
        if coordinator.is_plaintext:
            return None
        age_s = unix_ms() / 1000 - self._paths.certificate.stat().st_mtime
        return max(0.0, coordinator.certificate_life_s * 2 / 3 - max(0.0, age_s))

    async def renew(self, calls: Calls) -> None:
        """Get a fresh certificate for the same key; the next channel uses it.

        Raises:
            grpc.aio.AioRpcError: The coordinator cannot be reached or rejects it.
        """
        request = certificate_request_pem(self._paths, self._identity.node_id)
        response = await calls.renew(node_pb2.RenewCertificateRequest(certificate_request=request))
        renewed_coordinator = msgspec.structs.replace(
            self._coordinator(), certificate_life_s=_life_s(response.certificate_expires_unix_s)
        )
        await asyncio.to_thread(write_durably, self._paths.certificate, response.certificate)
        await asyncio.to_thread(save_coordinator, self._paths, renewed_coordinator)
        calls.bulk.take_certificate(self._paths.certificate, self._paths.tls_key)
        log.info("the certificate was renewed")

    def _coordinator(self) -> JoinedCoordinator:
        coordinator = load_coordinator(self._paths)
        if coordinator is None:
            detail = f"{self._paths.root} holds no certificate"
            raise HyperGPUError(Reason.NODE_NOT_JOINED, detail)
        return coordinator

    def _credentials(self, coordinator: JoinedCoordinator) -> TlsCredentials | None:
        if coordinator.is_plaintext:
            return None
        try:
            return TlsCredentials(
                self._paths.authority.read_bytes(),
                tls_key_pem(self._paths),
                self._paths.certificate.read_bytes(),
            )
        except OSError as error:
            detail = f"{error.filename}: {error.strerror}: join again"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error


def _life_s(expires_unix_s: int) -> int:
    """Life of a certificate. A clock that is off renews too often at worst."""
    return max(_LIFE_MIN_S, expires_unix_s - unix_ms() // 1000)
