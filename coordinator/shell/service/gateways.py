"""What a coordinator tells a gateway: its certificate, and where to pass calls and bytes on to."""

import secrets

import structlog

from coordinator.shell.nodes.identity.authority import Authority
from coordinator.shell.nodes.identity.gateways import HOSTS_MAX, gateway_name
from hypergpu.clock import unix_s
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import TokenId
from hypergpu.v1 import job_pb2

log = structlog.get_logger()

_PROBE_CONTEXT = "hypergpu 2026 probe tokens of gateways"
_HOST_LENGTH_MAX = 253


class GatewayCertifier:
    """Certifies gateways; without an authority it only tells them the ports."""

    def __init__(
        self, authority: Authority | None, ports: tuple[int, int] = (0, 0), *, lost_after_ms: int
    ) -> None:
        """``ports`` are those of nodes and of bulk."""
        self._authority = authority
        self._ports = ports
        self._lost_after_ms = lost_after_ms
        self._probe_secret = (
            secrets.token_bytes(32)
            if authority is None
            else authority.derived_secret(_PROBE_CONTEXT)
        )

    def certify(
        self, token_id: TokenId, request: job_pb2.CertifyGatewayRequest
    ) -> job_pb2.CertifyGatewayResponse:
        """A certificate that names the token that asks for it. Blocks.

        Raises:
            HyperGPUError: REQUEST_INVALID, the hosts or the certificate's request cannot be used.
        """
        hosts = request.hosts
        if len(hosts) > HOSTS_MAX or any(len(host) > _HOST_LENGTH_MAX for host in hosts):
            detail = f"a gateway has at most {HOSTS_MAX} hosts of {_HOST_LENGTH_MAX} letters"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail)
        answer = job_pb2.CertifyGatewayResponse(
            node_port=self._ports[0],
            bulk_port=self._ports[1],
            lost_after_ms=self._lost_after_ms,
            probe_secret=self._probe_secret,
        )
        if self._authority is not None:
            certificate = self._authority.issue_to_gateway(
                gateway_name(token_id), request.certificate_request, hosts, unix_s()
            )
            answer.certificate, answer.authority = certificate.pem, self._authority.pem
            answer.certificate_expires_unix_s = certificate.expires_s
        log.info("a gateway was certified", token_id=token_id, hosts=list(hosts))
        return answer
