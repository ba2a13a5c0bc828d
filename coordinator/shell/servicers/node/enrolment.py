"""Enrolment: a token and a signature for a certificate. Nothing is spent before all holds."""

import asyncio
import time

import msgspec
import structlog

from coordinator.shell import translate
from coordinator.shell.identity.authority import Authority, NodeCertificate
from coordinator.shell.identity.guesses import GuessLimiter
from coordinator.shell.identity.nodes import KnownNodes
from coordinator.shell.identity.tokens import IssuedTokens
from coordinator.shell.journal.records import NodeRecord
from coordinator.shell.servicers.access import peer_host
from coordinator.shell.servicers.wire.handlers import Caller
from coordinator.shell.servicers.wire.versions import reject_other_version, version_message
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId, TokenId
from hypergpu.keys.signature import JoinClaim, node_id_of, verify
from hypergpu.process.clock import unix_s
from hypergpu.v1 import node_pb2
from hypergpu.wire.token import Credential

log = structlog.get_logger()

_SOFTWARE_LENGTH_MAX = 200
_GUESSES = frozenset({Reason.TOKEN_INVALID, Reason.SIGNATURE_INVALID, Reason.REQUEST_INVALID})
"""What an honest node is never refused for: who keeps at it is slowed down."""


class Enrolment:
    """Admits nodes and renews their certificates; without an authority it issues none."""

    def __init__(
        self,
        *,
        authority: Authority | None,
        tokens: IssuedTokens,
        nodes: KnownNodes,
        guesses: GuessLimiter,
    ) -> None:
        self._authority = authority
        self._tokens = tokens
        self._nodes = nodes
        self._guesses = guesses
        self.node_port = 0
        """Port of the nodes' listener, once it is bound."""

    async def join(self, request: node_pb2.JoinRequest, caller: Caller) -> node_pb2.JoinResponse:
        """Admit a node.

        Raises:
            HyperGPUError: the version, the token, the signature or the request will not do.
        """
        reject_other_version(request.version)
        with self._guesses.count_failures(peer_host(caller.peer), _GUESSES):
            return await asyncio.to_thread(self._join, request)

    def _join(self, request: node_pb2.JoinRequest) -> node_pb2.JoinResponse:
        credential = Credential(TokenId(request.token_id), request.token_secret)
        node = node_id_of(request.public_key)
        # Before anything that costs more: a stranger is to make nobody sign or verify.
        self._tokens.check_join(credential, node, unix_s())
        claim = JoinClaim(credential.token_id, digest_of(request.certificate_request))
        if not verify(node, claim, request.signature):
            detail = "the signature is not the public key's over this request"
            raise HyperGPUError(Reason.SIGNATURE_INVALID, detail)
        self._nodes.check_not_revoked(node)
        record = _record(node, request)
        issued = self._issue_certificate(node, request.certificate_request)
        self._tokens.spend(credential, node, unix_s())
        self._nodes.admit(record)
        log.info("a node joined", node=node, token_id=credential.token_id)
        return node_pb2.JoinResponse(
            version=version_message(),
            node_id=node,
            certificate=issued.pem if issued else b"",
            certificate_expires_unix_s=issued.expires_s if issued else 0,
            node_port=self.node_port,
        )

    async def renew(
        self, node: NodeId, request: node_pb2.RenewCertificateRequest
    ) -> node_pb2.RenewCertificateResponse:
        """A fresh certificate for a node that still has a good one."""
        return await asyncio.to_thread(self._renew, node, request)

    def _renew(
        self, node: NodeId, request: node_pb2.RenewCertificateRequest
    ) -> node_pb2.RenewCertificateResponse:
        issued = self._issue_certificate(node, request.certificate_request)
        if issued is None:
            raise HyperGPUError(
                Reason.REQUEST_INVALID, "this coordinator runs without certificates"
            )
        return node_pb2.RenewCertificateResponse(
            certificate=issued.pem, certificate_expires_unix_s=issued.expires_s
        )

    def _issue_certificate(self, node: NodeId, request_pem: bytes) -> NodeCertificate | None:
        if self._authority is None:
            return None
        return self._authority.issue(node, request_pem, unix_s())


def _record(node: NodeId, request: node_pb2.JoinRequest) -> NodeRecord:
    now_ms = time.time_ns() // 1_000_000
    capabilities = translate.capabilities_value(request.capabilities)
    return NodeRecord(
        node=node,
        public_key=request.public_key,
        capabilities_json=msgspec.json.encode(capabilities),
        software=request.version.software[:_SOFTWARE_LENGTH_MAX],
        first_seen_ms=now_ms,
        last_seen_ms=now_ms,
    )
