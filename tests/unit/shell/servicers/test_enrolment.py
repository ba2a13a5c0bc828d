from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.shell.identity.guesses import GuessLimiter
from coordinator.shell.identity.nodes import KnownNodes
from coordinator.shell.identity.tokens import IssuedTokens, TokenGrant
from coordinator.shell.servicers.node.enrolment import Enrolment
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import TokenId
from hypergpu.keys.signature import IdentityKey, JoinClaim
from hypergpu.v1 import node_pb2
from hypergpu.wire.protocol import PROTOCOL, SOFTWARE
from hypergpu.wire.token import Role, Token
from tests.journals import FolderJournal

NOW_S = 1_900_000_000


class Peer:
    """Who calls, as far as a join looks."""

    peer = "ipv4:192.0.2.1:5000"


CALLER: Any = Peer()


class EnrolmentBench:
    """What a join needs, with one token that admits one node."""

    def __init__(self, folder: Path) -> None:
        journal = FolderJournal(folder)
        self.tokens = IssuedTokens(journal)
        self.joins = Enrolment(
            authority=None,
            tokens=self.tokens,
            nodes=KnownNodes(journal),
            guesses=GuessLimiter(),
        )
        self.token = self.tokens.create(
            TokenGrant(Role.NODE, ttl_s=0, uses=1),
            addresses=("host:7700",),
            authority=digest_of(b"authority"),
            now_s=NOW_S,
        )

    async def rejection_of(self, request: node_pb2.JoinRequest) -> Reason:
        """Why a join is refused."""
        with pytest.raises(HyperGPUError) as refused:
            await self.joins.join(request, CALLER)
        return refused.value.reason


def join_request(
    token: Token, *, workloads: int = 1, is_signed: bool = True, protocol: int = PROTOCOL
) -> node_pb2.JoinRequest:
    """A node's request."""
    key = IdentityKey.generate()
    claim = JoinClaim(TokenId(token.id), digest_of(b""))
    capabilities = node_pb2.Capabilities(
        workloads=[
            node_pb2.WorkloadVersion(name=f"workload-{number}", version=1)
            for number in range(workloads)
        ]
    )
    return node_pb2.JoinRequest(
        version=node_pb2.Version(protocol=protocol, software="test"),
        token_id=token.id,
        token_secret=token.secret,
        public_key=key.public_key,
        signature=key.sign(claim) if is_signed else bytes(65),
        capabilities=capabilities,
    )


async def test_the_token_is_judged_before_the_signature(tmp_path: Path) -> None:
    bench = EnrolmentBench(tmp_path)
    wrong = replace(bench.token, secret="a guess")
    assert await bench.rejection_of(join_request(wrong, is_signed=False)) is Reason.TOKEN_INVALID


async def test_wrong_signatures_are_slowed_down_like_wrong_secrets(tmp_path: Path) -> None:
    bench = EnrolmentBench(tmp_path)
    reasons = [
        await bench.rejection_of(join_request(bench.token, is_signed=False)) for _ in range(12)
    ]
    assert reasons[0] is Reason.SIGNATURE_INVALID
    assert reasons[-1] is Reason.RATE_LIMITED


async def test_a_node_that_signs_as_before_is_told_what_changed_and_how_to_upgrade(
    tmp_path: Path,
) -> None:
    bench = EnrolmentBench(tmp_path)
    with pytest.raises(HyperGPUError) as refused:
        await bench.joins.join(join_request(bench.token, protocol=1), CALLER)
    assert refused.value.reason is Reason.VERSION_MISMATCH
    assert refused.value.detail == (
        f"test speaks protocol 1, {SOFTWARE} speaks {PROTOCOL} (since 2 nodes sign"
        " contributions as EIP-712 data of their job's ledger);"
        " run on that machine: pip install --upgrade hypergpu"
    )
    assert str(refused.value).endswith("Fix: run on that machine: pip install --upgrade hypergpu")


async def test_a_newer_node_is_told_that_the_coordinator_is_older(tmp_path: Path) -> None:
    bench = EnrolmentBench(tmp_path)
    with pytest.raises(HyperGPUError, match="Fix: run where the coordinator runs: pip install"):
        await bench.joins.join(join_request(bench.token, protocol=PROTOCOL + 1), CALLER)


async def test_a_node_of_too_many_workloads_is_refused_and_spends_nothing(tmp_path: Path) -> None:
    bench = EnrolmentBench(tmp_path)
    assert (
        await bench.rejection_of(join_request(bench.token, workloads=1001))
        is Reason.REQUEST_INVALID
    )
    assert (await bench.joins.join(join_request(bench.token, workloads=1000), CALLER)).node_id
