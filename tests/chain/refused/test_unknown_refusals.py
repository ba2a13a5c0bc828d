"""An RPC that cannot try a call is not taken for a contract that refuses it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from hypergpu.ids import JobId
from tests.chain.ground import ORDER, Ground
from tests.chain.misbehaving_rpc import Answer, MisbehavingRpc, Script, misbehaving

SECOND = replace(ORDER, job_id=JobId("job-00000000000c"), escrow=500)
_WITH_OTHER_CODE = 3
"""Parameters of a call that is tried with other code for an address."""


@pytest.fixture
def rpc(ground: Ground) -> Iterator[MisbehavingRpc]:
    with misbehaving(ground.url) as server:
        ground.url = server.url
        yield server


def tries_none(error: dict[str, Any]) -> Script:
    def script(calls: list[dict[str, Any]], _truth: bytes) -> Answer | None:
        if calls[0]["method"] != "eth_call" or len(calls[0]["params"]) != _WITH_OTHER_CODE:
            return None
        answer = {"jsonrpc": "2.0", "id": calls[0]["id"], "error": error}
        return Answer(json.dumps(answer).encode())

    return script


@pytest.mark.parametrize("message", ["out of gas", "execution reverted"])
def test_a_refusal_without_a_word_and_without_its_code_keeps_no_order_waiting(
    ground: Ground, rpc: MisbehavingRpc, message: str
) -> None:
    ground.opened()
    rpc.script = tries_none({"code": -32000, "message": message})
    result = ground.settler.turn([SECOND])
    assert (dict(result.held), result.turn.complaints) == ({}, ())
    ground.rest()
    job = ground.settler.site.job(SECOND.job_id)
    assert job is not None
    assert job.free == SECOND.escrow


def test_a_refusal_without_a_word_and_with_its_code_is_one(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.opened()
    rpc.script = tries_none({"code": 3, "message": "execution reverted"})
    result = ground.settler.turn([SECOND])
    assert "a contract refused it without a word" in result.held[SECOND.job_id].why
