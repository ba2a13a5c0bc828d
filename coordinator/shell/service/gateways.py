"""What a coordinator tells a gateway: its certificate, and where to pass calls and bytes on to."""

import secrets
from collections.abc import Sequence

import structlog

from coordinator.shell.nodes.identity.authority import Authority
from coordinator.shell.nodes.identity.gateways import HOSTS_MAX, gateway_name
from hypergpu.clock import unix_s
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import TokenId
from hypergpu.v1 import job_pb2, serving_pb2

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
        _check_hosts(hosts, "a gateway")
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

    def certify_api(
        self, token_id: TokenId, request: serving_pb2.CertifyApiRequest
    ) -> serving_pb2.CertifyApiResponse:
        """A certificate of an API of served models. Blocks.

        Raises:
            HyperGPUError: NOT_READY, there is no authority; REQUEST_INVALID, the hosts or the
                certificate's request cannot be used.
        """
        _check_hosts(request.hosts, "an API")
        if self._authority is None:
            detail = "this coordinator runs without TLS, and has no CA"
            fix = "give the API a certificate: --tls-certificate and --tls-key"
            raise HyperGPUError(Reason.NOT_READY, detail, fix=fix)
        name = f"hypergpu-api {token_id}"
        certificate = self._authority.issue_to_api(
            name, request.certificate_request, request.hosts, unix_s()
        )
        log.info("an API was certified", token_id=token_id, hosts=list(request.hosts))
        return serving_pb2.CertifyApiResponse(
            certificate=certificate.pem,
            certificate_expires_unix_s=certificate.expires_s,
            authority=self._authority.pem,
        )


def _check_hosts(hosts: Sequence[str], whose: str) -> None:
    if len(hosts) > HOSTS_MAX or any(len(host) > _HOST_LENGTH_MAX for host in hosts):
        detail = f"{whose} has at most {HOSTS_MAX} hosts of {_HOST_LENGTH_MAX} letters"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
