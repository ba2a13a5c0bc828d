"""Who may look and steer: codes, cookies, tokens, and everything that is refused."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

from dashboard_api.core.sessions import CODE_GOOD_MS, CodeBook
from dashboard_api.shell.server import ENDPOINTS
from hypergpu.wire.credentials import Role, token_text
from tests.dashboard_server import DashboardUnderTest, dashboard, token_of

PREFIX = "/api/v1"
CLOSED_ENDPOINTS = [each for each in ENDPOINTS if not each.is_open]
CHANGING = [each for each in ENDPOINTS if each.method != "GET"]


def path_of(path: str) -> str:
    return PREFIX + path.replace("{job}", "job-1").replace("{node}", "0x1").replace(
        "{upload}", "0" * 32
    )


async def log_in(under_test: DashboardUnderTest, client: httpx.AsyncClient) -> httpx.Response:
    headers = {"origin": under_test.origin}
    body = {"code": under_test.code()}
    return await client.post(f"{PREFIX}/session", json=body, headers=headers)


async def test_a_code_is_exchanged_once_for_a_cookie_that_no_script_reads(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as under_test, under_test.client() as client:
        body, headers = {"code": under_test.code()}, {"origin": under_test.origin}
        first = await client.post(f"{PREFIX}/session", json=body, headers=headers)
        assert first.status_code == 200
        assert first.json()["role"] == "operator"
        cookie = first.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        who = await client.get(f"{PREFIX}/session")
        assert who.json()["name"] == under_test.services.target.token.id
        second = await client.post(f"{PREFIX}/session", json=body, headers=headers)
        assert second.status_code == 401
        assert "used already" in second.json()["message"]


async def test_a_session_ends_when_its_holder_says_so(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as under_test, under_test.client() as client:
        cookie = (await log_in(under_test, client)).headers["set-cookie"].partition(";")[0]
        headers = {"origin": under_test.origin, "cookie": cookie}
        assert (await client.delete(f"{PREFIX}/session", headers=headers)).status_code == 200
        cookie_client = under_test.client(cookie=cookie)
        async with cookie_client:
            assert (await cookie_client.get(f"{PREFIX}/session")).status_code == 401


async def test_a_session_survives_a_restart_and_the_database_holds_no_token(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as under_test, under_test.client() as client:
        cookie = (await log_in(under_test, client)).headers["set-cookie"].partition(";")[0]
        value = cookie.partition("=")[2]
        secret = token_text(under_test.services.target.token)
    stored_bytes = b"".join(
        path.read_bytes() for path in (tmp_path / "dashboard").iterdir() if path.is_file()
    )
    assert secret.encode() not in stored_bytes
    assert value.encode() not in stored_bytes
    async with dashboard(tmp_path) as again:
        # Cookies are named after the port, which is another one here.
        cookie = f"{again.services.cookie_name}={value}"
        async with again.client(cookie=cookie) as client:
            assert (await client.get(f"{PREFIX}/session")).status_code == 200


def test_a_code_is_refused_after_ten_minutes() -> None:
    codes = CodeBook()
    codes.add("fresh", 0)
    codes.add("late", 0)
    assert codes.redeem("fresh", CODE_GOOD_MS - 1) == ""
    assert "older than ten minutes" in codes.redeem("late", CODE_GOOD_MS)


def test_guessing_is_refused_for_a_minute_after_ten_wrong_codes() -> None:
    codes = CodeBook()
    codes.add("right", 0)
    for number in range(10):
        assert codes.redeem(f"guess {number}", number)
    assert "too many" in codes.redeem("right", 20)
    assert codes.redeem("right", 60_010) == ""


@pytest.mark.parametrize("role", [Role.NODE, Role.OPERATOR])
async def test_tokens_of_other_coordinators_are_refused(role: Role, tmp_path: Path) -> None:
    async with dashboard(tmp_path) as under_test, under_test.client() as client:
        token = token_of(role, "127.0.0.1:1")
        token = type(token)(token.addresses, "a" * 64, role, token.id, token.secret)  # type: ignore[arg-type]
        headers = {"origin": under_test.origin}
        body = {"token": token_text(token)}
        response = await client.post(f"{PREFIX}/session", json=body, headers=headers)
        assert response.status_code in (401, 403)
        assert "s" * 22 not in response.text


async def test_every_endpoint_refuses_a_host_that_is_not_ours(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as under_test, under_test.client() as client:
        headers = {**under_test.bearer, "host": "evil.example:7780"}
        for each in ENDPOINTS:
            answer = await client.request(each.method, path_of(each.path), headers=headers)
            assert answer.status_code == 403, each.path
            assert "not one of this server's names" in answer.json()["message"]
        for path in ("/", "/metrics", "/healthz"):
            assert (await client.get(path, headers=headers)).status_code == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
async def test_every_change_from_another_origin_is_refused(origin: str, tmp_path: Path) -> None:
    async with dashboard(tmp_path) as under_test, under_test.client() as client:
        await log_in(under_test, client)
        for each in CHANGING:
            answer = await client.request(
                each.method, path_of(each.path), headers={"origin": origin}
            )
            assert answer.status_code == 403, each.path
            assert "is not this page" in answer.json()["message"]


async def test_every_change_without_origin_and_token_is_refused(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as under_test, under_test.client() as client:
        await log_in(under_test, client)
        for each in CHANGING:
            answer = await client.request(each.method, path_of(each.path))
            assert answer.status_code == 403, each.path


async def test_nothing_is_answered_without_a_session(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as under_test, under_test.client() as client:
        headers = {"origin": under_test.origin}
        for each in CLOSED_ENDPOINTS:
            answer = await client.request(each.method, path_of(each.path), headers=headers)
            assert answer.status_code == 401, each.path
            assert set(answer.json()) == {"number", "message", "fix"}


async def test_a_users_token_reads_no_audit_log_and_makes_no_links(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as under_test, under_test.client() as client:
        token = token_of(Role.USER, under_test.services.target.address)
        headers = {"authorization": f"Bearer {token_text(token)}"}
        assert (await client.get(f"{PREFIX}/audit", headers=headers)).status_code == 403
        assert (await client.post(f"{PREFIX}/links", headers=headers)).status_code == 403


async def test_a_nodes_token_is_answered_about_its_own_nodes_alone(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as under_test, under_test.client() as client:
        token = token_of(Role.NODE, under_test.services.target.address)
        headers = {"authorization": f"Bearer {token_text(token)}"}
        for each in CLOSED_ENDPOINTS:
            if not each.for_node_owners:
                answer = await client.request(each.method, path_of(each.path), headers=headers)
                assert answer.status_code == 403, each.path
                assert "is not for a node's token" in answer.json()["message"]
    assert {each.path for each in CLOSED_ENDPOINTS if each.for_node_owners} == {
        *("/jobs/{job}/series", "/jobs/{job}/rounds", "/jobs/{job}/events"),
        *("/nodes/{node}/history", "/nodes/{node}/pause"),
        *("/nodes/{node}/resume", "/nodes/{node}/drain"),
    }


async def test_actions_are_in_the_audit_log_with_their_outcome(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as under_test, under_test.client() as client:
        await client.post(f"{PREFIX}/jobs/job-1/pause", headers=under_test.bearer)
        answer = await client.get(f"{PREFIX}/audit", headers=under_test.bearer)
        newest = answer.json()["actions"][0]
        assert newest["action"] == "Pause a job now; what was accepted stays (job-1)"
        assert newest["token"] == under_test.services.target.token.id
        assert "COORDINATOR_UNREACHABLE" in newest["outcome"]


async def test_a_feed_is_refused_to_other_origins_and_without_a_session(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as under_test:
        with pytest.raises(websockets.InvalidStatus):
            async with under_test.open_feed(additional_headers={"Origin": "http://evil.example"}):
                pass
        port = under_test.services.port
        here: dict[str, Any] = {"host": "127.0.0.1", "port": port, "proxy": None}
        with pytest.raises(websockets.InvalidStatus):
            async with websockets.connect("ws://evil.example/feed", **here):
                pass
        async with under_test.open_feed(
            additional_headers={"Origin": under_test.origin}
        ) as connection:
            with pytest.raises(websockets.ConnectionClosed) as failure:
                await connection.recv()
            assert failure.value.rcvd is not None
            assert failure.value.rcvd.code == 4401


async def test_answers_carry_a_policy_that_allows_our_own_parts_alone(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as under_test, under_test.client() as client:
        page = await client.get("/")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert page.headers["x-content-type-options"] == "nosniff"


async def test_a_body_beyond_its_limit_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as under_test, under_test.client(**under_test.bearer) as client:
        answer = await client.post(f"{PREFIX}/session", content=b"x" * (2 << 20))
        assert answer.status_code == 413
