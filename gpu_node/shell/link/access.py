"""What the node shows of itself and how it got that: the join, and its certificate's renewal."""

import asyncio
from typing import NamedTuple

import grpc
import msgspec
import structlog
from cryptography import x509

from gpu_node.shell import translate
from gpu_node.shell.link.calls import Calls, Metadata
from gpu_node.shell.link.channels import Credentials, open_channel
from gpu_node.shell.link.refusals import refusal_in, why
from gpu_node.shell.link.route import Route
from gpu_node.shell.state.files import Coordinator, load_coordinator, save_coordinator
from gpu_node.shell.state.keys import certificate_request_pem, tls_key_pem
from gpu_node.shell.state.places import Places
from gpu_node.shell.state.receipts import ReceiptKeeper
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.files import write_durably
from hypergpu.keys.signature import IdentityKey, JoinClaim
from hypergpu.process.clock import unix_ms
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2
from hypergpu.wire.authority import fetch_authority, split_address
from hypergpu.wire.congestion import BBR
from hypergpu.wire.protocol import PROTOCOL_ENTRY
from hypergpu.wire.token import Role, Token

log = structlog.get_logger()

NODE_KEY = "hypergpu-node"
_LIFE_MIN_S = 3600
_UNTRUSTWORTHY = frozenset({Reason.COORDINATOR_UNREACHABLE})


class Applicant(NamedTuple):
    """Who joins."""

    places: Places
    identity: IdentityKey
    capabilities: node_pb2.Capabilities
    timeout_ms: Milliseconds


async def join(applicant: Applicant, token: Token) -> Coordinator:
    """Trade a token for a certificate at the first address that answers.

    The CA that the address presents is checked against the token before the secret is sent.

    Raises:
        HyperGPUError: COORDINATOR_UNREACHABLE when no address answers, AUTHORITY_MISMATCH when
            another CA does, ROLE_FORBIDDEN for another role's token, or what the coordinator says.
    """
    if token.role is not Role.NODE:
        detail = f"the token is for a {token.role.value}: a node joins with a node's token"
        raise HyperGPUError(Reason.ROLE_FORBIDDEN, detail)
    failures: list[str] = []
    for address in token.addresses:
        try:
            return await _join_at(address, applicant, token)
        except HyperGPUError as refused:
            if refused.reason not in _UNTRUSTWORTHY:
                raise
            failures.append(refused.detail)
    raise HyperGPUError(Reason.COORDINATOR_UNREACHABLE, "; ".join(failures))


async def _join_at(address: str, applicant: Applicant, token: Token) -> Coordinator:
    timeout_s = applicant.timeout_ms / 1000
    authority = None
    if token.authority:
        authority = await asyncio.to_thread(
            fetch_authority, address, token.authority, timeout_s=timeout_s
        )
    credentials = None if authority is None else Credentials(authority)
    async with open_channel(address, credentials) as channel:
        request = await asyncio.to_thread(_join_request, applicant, token)
        try:
            response = await Calls(channel, (PROTOCOL_ENTRY,), applicant.timeout_ms).join(request)
        except grpc.aio.AioRpcError as broken:
            raise _refusal(address, broken) from broken
    translate.refuse_other_version(response.version)
    return await asyncio.to_thread(_keep, applicant, address, authority, response)


def _join_request(applicant: Applicant, token: Token) -> node_pb2.JoinRequest:
    identity = applicant.identity
    request = certificate_request_pem(applicant.places, identity.node_id)
    return node_pb2.JoinRequest(
        version=translate.version_message(),
        token_id=token.id,
        token_secret=token.secret,
        public_key=identity.public_key,
        certificate_request=request,
        capabilities=applicant.capabilities,
        signature=identity.sign(JoinClaim(token.id, digest_of(request))),
    )


def _refusal(address: str, broken: grpc.aio.AioRpcError) -> HyperGPUError:
    refused = refusal_in(broken)
    if refused is not None:
        return refused
    detail = f"{address}: {why(broken)}"
    return HyperGPUError(Reason.COORDINATOR_UNREACHABLE, detail)


def _keep(
    applicant: Applicant, address: str, authority: bytes | None, response: node_pb2.JoinResponse
) -> Coordinator:
    if response.node_id != applicant.identity.node_id:
        detail = f"{address} took this node for {response.node_id[:64]!r}"
        raise HyperGPUError(Reason.SIGNATURE_INVALID, detail)
    host, _ = split_address(address)
    shown = f"[{host}]" if ":" in host else host
    coordinator = Coordinator(
        address=f"{shown}:{response.node_port}",
        is_plaintext=authority is None,
        certificate_life_s=_life_s(response.certificate_expires_unix_s),
    )
    if authority is not None:
        write_durably(applicant.places.authority, authority)
        write_durably(applicant.places.certificate, response.certificate)
    save_coordinator(applicant.places, coordinator)
    return coordinator


class Access:
    """How this node gets in: address, certificates and what it says of itself with each call."""

    def __init__(
        self, places: Places, identity: IdentityKey, *, congestion_control: str = ""
    ) -> None:
        """``congestion_control`` is what the route to the coordinator is to have, if anything."""
        self._places = places
        self._identity = identity
        self._route = Route() if congestion_control == BBR else None

    def receipts(self) -> ReceiptKeeper:
        """The node's receipts. Reads them."""
        return ReceiptKeeper(self._places, self._identity.node_id)

    @property
    def is_joined(self) -> bool:
        """Whether the node can dial without a token."""
        return load_coordinator(self._places) is not None

    @property
    def dialled(self) -> tuple[str, int]:
        """Host and port of the coordinator's listener for nodes. Reads a small file.

        Raises:
            HyperGPUError: NODE_NOT_JOINED, or FILE_UNUSABLE.
        """
        return split_address(self._coordinator().address)

    def make_way(self) -> None:
        """See to the route before a dial. Blocks.

        Raises:
            HyperGPUError: NODE_NOT_JOINED, or FILE_UNUSABLE.
        """
        if self._route is not None:
            self._route.hold(*self.dialled)

    def leave_way(self) -> None:
        """Take back what was done to the route, for good. Blocks."""
        if self._route is not None:
            self._route.close()

    def calls(self, timeout_ms: Milliseconds) -> Calls:
        """Calls over a fresh channel with the newest certificate. Reads small files.

        Raises:
            HyperGPUError: NODE_NOT_JOINED, or FILE_UNUSABLE.
        """
        coordinator = self._coordinator()
        channel = open_channel(coordinator.address, self._credentials(coordinator))
        return Calls(channel, self._metadata(coordinator), timeout_ms)

    def _metadata(self, coordinator: Coordinator) -> Metadata:
        """Sent with each call. Without TLS it also says who calls, which only loopback may."""
        if coordinator.is_plaintext:
            return (PROTOCOL_ENTRY, (NODE_KEY, self._identity.node_id))
        return (PROTOCOL_ENTRY,)

    def out_of_date(self) -> str:
        """Why the certificate admits the node no more, as far as this machine's clock is right."""
        certificate = self._certificate()
        if certificate is None or _left_s(certificate) > 0:
            return ""
        return (
            "the certificate ran out while the node was away:"
            " join again with a fresh token: hypergpu-node join --token-file FILE"
        )

    def renewal_due_s(self) -> float | None:
        """Seconds until two thirds of the certificate's life are over; None without one.

        Counted from when it was written here: the coordinator's clock does not come into it.
        """
        coordinator = self._coordinator()
        if coordinator.is_plaintext:
            return None
        age_s = unix_ms() / 1000 - self._places.certificate.stat().st_mtime
        return max(0.0, coordinator.certificate_life_s * 2 / 3 - max(0.0, age_s))

    async def renew(self, calls: Calls) -> None:
        """Get a fresh certificate for the same key; the next channel uses it.

        Raises:
            grpc.aio.AioRpcError: The coordinator cannot be reached or refuses.
        """
        request = certificate_request_pem(self._places, self._identity.node_id)
        response = await calls.renew(node_pb2.RenewCertificateRequest(certificate_request=request))
        renewed = msgspec.structs.replace(
            self._coordinator(), certificate_life_s=_life_s(response.certificate_expires_unix_s)
        )
        await asyncio.to_thread(write_durably, self._places.certificate, response.certificate)
        await asyncio.to_thread(save_coordinator, self._places, renewed)
        log.info("the certificate was renewed")

    def _coordinator(self) -> Coordinator:
        coordinator = load_coordinator(self._places)
        if coordinator is None:
            detail = f"{self._places.root} holds no certificate"
            raise HyperGPUError(Reason.NODE_NOT_JOINED, detail)
        return coordinator

    def _credentials(self, coordinator: Coordinator) -> Credentials | None:
        if coordinator.is_plaintext:
            return None
        try:
            return Credentials(
                self._places.authority.read_bytes(),
                tls_key_pem(self._places),
                self._places.certificate.read_bytes(),
            )
        except OSError as broken:
            detail = f"{broken.filename}: {broken.strerror}: join again"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken

    def _certificate(self) -> x509.Certificate | None:
        if self._coordinator().is_plaintext:
            return None
        return x509.load_pem_x509_certificate(self._places.certificate.read_bytes())


def _life_s(expires_unix_s: int) -> int:
    """How long a certificate is good for. A clock that is off renews too often at worst."""
    return max(_LIFE_MIN_S, expires_unix_s - unix_ms() // 1000)


def _left_s(certificate: x509.Certificate) -> float:
    return certificate.not_valid_after_utc.timestamp() - unix_ms() / 1000
