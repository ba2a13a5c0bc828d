"""Who may speak for a node: a gateway, while the token that its certificate names is good."""

from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.shell.gateway.upstream import made_key
from coordinator.shell.nodes.identity.authority import Authority
from coordinator.shell.nodes.identity.gateways import NODE_KEY, gateway_name, gateway_token
from coordinator.shell.nodes.identity.tokens import IssuedTokens, TokenGrant
from coordinator.shell.nodes.known_nodes import KnownNodes
from coordinator.shell.service.calls import Caller
from coordinator.shell.service.gates import NodeGate
from coordinator.shell.service.gateways import GatewayCertifier
from coordinator.shell.store.journal.records import NodeRecord
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, NodeId, TokenId
from hypergpu.protocol import PROTOCOL_ENTRY
from hypergpu.v1 import job_pb2
from hypergpu.wire.credentials import Role
from tests.calls_in_process import CallContext
from tests.journals import FolderJournal

NOW_S = 1_900_000_000
ALICE, BOB = NodeId("0x" + "a1" * 20), NodeId("0x" + "b0" * 20)


class CertifiedContext(CallContext):
    """A call over mutual TLS."""

    def __init__(self, name: str, node: NodeId) -> None:
        super().__init__([])
        self._name = name
        self._metadata = (PROTOCOL_ENTRY, (NODE_KEY, node))

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        return {"x509_common_name": (self._name.encode(),)}


class Door:
    """A gate that knows two nodes, and an operator's token."""

    def __init__(self, folder: Path) -> None:
        journal = FolderJournal(folder)
        self.tokens, nodes = IssuedTokens(journal), KnownNodes(journal)
        for node in (ALICE, BOB):
            nodes.admit(NodeRecord(node, b"", b"{}", "", NOW_S, NOW_S))
        grant = TokenGrant(Role.OPERATOR, ttl_s=0, uses=0)
        new_token = self.tokens.create(grant, addresses=("a:1",), authority=Digest(""), now_s=NOW_S)
        self.token_id = new_token.id
        self.gate = NodeGate(nodes, is_plaintext=False, tokens=self.tokens)

    async def node(self, name: str, named: NodeId) -> NodeId:
        """For whom a caller speaks whose certificate has a name and whose metadata another."""
        caller = Caller(CertifiedContext(name, named), "NodeService.Control")
        await self.gate.admit(caller)
        return self.gate.node(caller)


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


async def test_a_node_speaks_for_no_other_node(door: Door) -> None:
    assert await door.node(ALICE, named=BOB) == ALICE


async def test_a_gateway_speaks_for_the_node_that_it_names(door: Door) -> None:
    assert await door.node(gateway_name(door.token_id), named=BOB) == BOB


async def test_a_gateway_is_refused_once_its_token_was_revoked(door: Door) -> None:
    door.tokens.revoke(door.token_id)
    with pytest.raises(HyperGPUError) as failure:
        await door.node(gateway_name(door.token_id), named=BOB)
    assert failure.value.reason is Reason.TOKEN_REVOKED


async def test_a_gateway_of_an_unknown_token_is_refused(door: Door) -> None:
    with pytest.raises(HyperGPUError) as failure:
        await door.node(gateway_name(TokenId("0" * 12)), named=BOB)
    assert failure.value.reason is Reason.TOKEN_INVALID


def test_a_gateways_certificate_names_its_token_and_its_hosts(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path, NOW_S)
    certifier = GatewayCertifier(authority, lost_after_ms=15_000)
    request = job_pb2.CertifyGatewayRequest(
        certificate_request=made_key().request_pem, hosts=["gate.example.org"]
    )
    answer = certifier.certify(TokenId("0123456789ab"), request)
    certificate = x509.load_pem_x509_certificate(answer.certificate)
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert gateway_token(str(name.value)) == "0123456789ab"
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usages) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = names.get_values_for_type(x509.DNSName)
    assert {"hypergpu-coordinator", "gate.example.org"} <= set(hosts)
    assert answer.authority == authority.pem


def test_gateways_of_all_coordinators_with_one_authority_share_the_key_of_probes(
    tmp_path: Path,
) -> None:
    secrets = []
    for _ in range(2):
        authority = Authority.open(tmp_path, NOW_S)
        certifier = GatewayCertifier(authority, lost_after_ms=1)
        request = job_pb2.CertifyGatewayRequest(certificate_request=made_key().request_pem)
        secrets.append(certifier.certify(TokenId("0" * 12), request).probe_secret)
    assert secrets[0] == secrets[1]
    assert len(secrets[0]) == 32


def test_more_hosts_than_a_gateway_has_are_refused() -> None:
    certifier = GatewayCertifier(None, lost_after_ms=1)
    request = job_pb2.CertifyGatewayRequest(hosts=["a"] * 65)
    with pytest.raises(HyperGPUError, match="at most 64 hosts"):
        certifier.certify(TokenId("0" * 12), request)
