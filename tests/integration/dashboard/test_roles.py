"""What each role may do on the page, as the coordinator decides it."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace

from dashboard_api.shell.server import ENDPOINTS
from dashboard_api.shell.uploads import UPLOADS_MAX
from dashboard_api.shell.views import VIEWS_MAX
from hypergpu.ids import TokenId
from hypergpu.jobfile.reading import parse_job
from hypergpu.user.client import Coordinator
from hypergpu.wire.credentials import Role, parse_token, token_text
from tests.integration.dashboard.test_live import feed_at, page_beside
from tests.processes import Cluster

JOB = """
workload = "digits-softmax"
[training]
nodes = 2
"""
BODIES = {
    "/jobs": {"toml": JOB},
    "/estimates": {"toml": JOB},
    "/uploads": {"name": "x.npz", "size_bytes": 1},
    "/jobs/{job}/parameters": {"set": {"rounds": 9}},
}
CHANGING = [each for each in ENDPOINTS if each.method != "GET" and not each.is_open]
ANSWER = "POST /jobs/{job}/answer"
SERVE = "POST /jobs/{job}/serve"


def token_for(operator: Coordinator, role: Role) -> tuple[str, dict[str, str]]:
    """Id of a fresh token, and headers with it."""
    new_token = operator.create_token(role, ttl_s=600, label="test")
    return new_token.id, {"authorization": f"Bearer {new_token.token}"}


async def statuses(origin: str, headers: dict[str, str], job: str) -> dict[str, int]:
    """Answers to everything that changes something."""
    codes_by_call = {}
    async with httpx.AsyncClient(base_url=origin, headers=headers, trust_env=False) as client:
        for each in CHANGING:
            path = each.path.replace("{job}", job).replace("{upload}", "0" * 32)
            path = f"/api/v1{path.replace('{node}', '0x' + '0' * 40)}"
            body = BODIES.get(each.path, {})
            answer = await client.request(each.method, path, json=body, timeout=60)
            codes_by_call[f"{each.method} {each.path}"] = answer.status_code
    return codes_by_call


async def test_a_viewer_changes_nothing_and_a_user_nothing_of_others(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path) as cluster,
        page_beside(cluster) as origin,
        cluster.coordinator.client() as operator,
    ):
        job = operator.submit(parse_job(JOB))
        viewer_id, viewer = token_for(operator, Role.VIEWER)
        codes_by_call = await statuses(origin, viewer, job)
        # A viewer has no upload that a piece could belong to.
        assert codes_by_call.pop("PUT /uploads/{upload}") == 404
        assert set(codes_by_call.values()) == {403}, codes_by_call
        assert len(codes_by_call) > 10
        _, user = token_for(operator, Role.USER)
        codes_by_call = await statuses(origin, user, job)
        # A model of somebody else is not there.
        assert codes_by_call.pop(ANSWER) == 404
        assert codes_by_call.pop(SERVE) == 404
        refused_calls = {name for name, status in codes_by_call.items() if status == 403}
        own = {"POST /jobs", "POST /estimates", "POST /uploads", "PUT /uploads/{upload}"}
        assert refused_calls == set(codes_by_call) - own, codes_by_call
        async with feed_at(origin, viewer) as connection:
            await connection.recv()
            operator.revoke_token(viewer_id)
            async with asyncio.timeout(10):
                await connection.wait_closed()
        assert connection.close_code == 4403
        assert "was revoked" in connection.close_reason
        async with httpx.AsyncClient(base_url=origin, headers=viewer, trust_env=False) as client:
            answer = await client.get(f"/api/v1/jobs/{job}/rounds")
            assert answer.status_code == 401


def line_with(line: str, **changes: Any) -> dict[str, str]:
    """Headers with the token of a line, some of its text changed."""
    return {"authorization": f"Bearer {token_text(replace(parse_token(line), **changes))}"}


async def test_what_a_tokens_text_says_of_itself_is_believed_by_nobody(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path) as cluster,
        page_beside(cluster) as origin,
        cluster.coordinator.client() as operator,
    ):
        line = operator.create_token(Role.NODE, ttl_s=600, label="line").token
        revoked_token = operator.create_token(Role.OPERATOR, ttl_s=600, label="gone")
        operator.revoke_token(revoked_token.id)
        forged_headers = {
            "a node's line that says operator": line_with(line, role=Role.OPERATOR),
            "a node's line that says user": line_with(line, role=Role.USER),
            "an invented id": line_with(line, role=Role.OPERATOR, id=TokenId("f" * 12)),
            "an invented secret": line_with(revoked_token.token, secret="s" * 43),
            "a revoked token": line_with(revoked_token.token),
        }
        upload = {"name": "x.bin", "size_bytes": 500_000_000}
        async with httpx.AsyncClient(base_url=f"{origin}/api/v1", trust_env=False) as client:
            for name, headers in forged_headers.items():
                for path in ("/audit", "/workloads", "/comparisons", "/session"):
                    answer = await client.get(path, headers=headers)
                    assert answer.status_code == 401, (name, path, answer.text)
                    assert answer.json()["fix"], answer.text
                response = await client.post("/uploads", headers=headers, json=upload)
                assert response.status_code == 401, (name, response.text)
            own = {"authorization": f"Bearer {own_token(cluster)}"}
            audit = await client.get("/audit", headers=own)
        assert audit.json()["actions"] == []


async def test_invented_tokens_keep_nobody_off_the_page(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path) as cluster,
        page_beside(cluster) as origin,
        cluster.coordinator.client() as operator,
    ):
        job = operator.submit(parse_job(JOB))
        _, user = token_for(operator, Role.USER)
        line = user["authorization"].removeprefix("Bearer ")
        async with httpx.AsyncClient(base_url=f"{origin}/api/v1", trust_env=False) as client:
            path = f"/jobs/{job}/rounds"
            for number in range(2 * VIEWS_MAX):
                headers = line_with(line, id=TokenId(f"{number:012x}"))
                assert (await client.get(path, headers=headers)).status_code == 401
            assert (await client.get(path, headers=user)).status_code == 200
            # The same token in other words is the same holder: no further view, no further uploads.
            statuses = set()
            for number in range(UPLOADS_MAX + 1):
                headers = line_with(line, addresses=(f"127.0.0.1:{number + 1}",))
                body = {"name": "x.bin", "size_bytes": 10}
                statuses.add(
                    (await client.post("/uploads", headers=headers, json=body)).status_code
                )
            assert statuses == {201, 429}


def own_token(cluster: Cluster) -> str:
    return (cluster.coordinator.data_dir / "operator.token").read_text("utf-8").strip()
