"""What each role may do on the page, as the coordinator decides it."""

import asyncio
from pathlib import Path

import httpx

from dashboard_api.shell.server import ENDPOINTS
from hypergpu.client import Coordinator
from hypergpu.jobfile.reading import parse_job
from hypergpu.wire.credentials import Role
from tests.integration.dashboard.test_live import feed_at, page_beside
from tests.processes import Cluster

JOB = """
workload = "digits-softmax"
[training]
nodes = 2
"""
BODIES = {
    "/jobs": {"toml": JOB},
    "/uploads": {"name": "x.npz", "size_bytes": 1},
    "/jobs/{job}/parameters": {"set": {"rounds": 9}},
}
CHANGING = [each for each in ENDPOINTS if each.method != "GET" and not each.is_open]


def token_for(operator: Coordinator, role: Role) -> tuple[str, dict[str, str]]:
    """Id of a fresh token, and headers with it."""
    made = operator.create_token(role, ttl_s=600, label="test")
    return made.id, {"authorization": f"Bearer {made.token}"}


async def statuses(origin: str, headers: dict[str, str], job: str) -> dict[str, int]:
    """Answers to everything that changes something."""
    found = {}
    async with httpx.AsyncClient(base_url=origin, headers=headers, trust_env=False) as client:
        for each in CHANGING:
            path = each.path.replace("{job}", job).replace("{upload}", "0" * 32)
            path = f"/api/v1{path.replace('{node}', '0x' + '0' * 40)}"
            body = BODIES.get(each.path, {})
            answer = await client.request(each.method, path, json=body, timeout=60)
            found[f"{each.method} {each.path}"] = answer.status_code
    return found


async def test_a_viewer_changes_nothing_and_a_user_nothing_of_others(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path) as cluster,
        page_beside(cluster) as origin,
        cluster.coordinator.client() as operator,
    ):
        job = operator.submit(parse_job(JOB))
        viewer_id, viewer = token_for(operator, Role.VIEWER)
        found = await statuses(origin, viewer, job)
        # A viewer has no upload that a piece could belong to.
        assert found.pop("PUT /uploads/{upload}") == 404
        assert set(found.values()) == {403}, found
        assert len(found) > 10
        _, user = token_for(operator, Role.USER)
        found = await statuses(origin, user, job)
        refused = {name for name, status in found.items() if status == 403}
        own = {"POST /jobs", "POST /uploads", "PUT /uploads/{upload}"}
        assert refused == set(found) - own, found
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
