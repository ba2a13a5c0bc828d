"""Tokens: their text, and what the registry makes, counts and revokes."""

import base64
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from msgspec.structs import replace

from coordinator.shell.nodes.identity.tokens import IssuedTokens, TokenGrant
from coordinator.shell.nodes.known_nodes import KnownNodes
from coordinator.shell.rate import GUESSES, LINES, GuessLimiter, LineLimiter, OpenCounter
from coordinator.shell.store.journal.records import NodeRecord
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, NodeId, TokenId
from hypergpu.rates import Rate, RateLimiter
from hypergpu.units import Milliseconds
from hypergpu.wire.credentials import (
    Credential,
    Role,
    Token,
    authorization,
    parse_authorization,
    parse_token,
    token_text,
)
from tests.journals import FolderJournal

TOKEN = Token(
    addresses=("train.example.org:7700", "[2001:db8::1]:7700", "10.0.0.1:7700"),
    authority=digest_of(b"authority"),
    role=Role.NODE,
    id=TokenId("0123456789ab"),
    secret="s3cret_s3cret-s3cret_s3cret-s3cret",
)


def with_changes(**fields: object) -> str:
    content = msgspec.json.encode(msgspec.to_builtins(TOKEN) | fields)
    return "hgpu1." + base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def test_a_token_survives_its_text() -> None:
    assert parse_token(token_text(TOKEN)) == TOKEN


def test_a_tokens_text_is_one_word_of_url_characters() -> None:
    assert token_text(TOKEN).removeprefix("hgpu1.").replace("-", "").replace("_", "").isalnum()


def test_white_space_around_a_pasted_token_is_dropped() -> None:
    assert parse_token(f"  {token_text(TOKEN)}\n") == TOKEN


def test_a_token_without_an_authority_is_for_plaintext() -> None:
    assert parse_token(with_changes(authority="")).authority == Digest("")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "starts with"),
        ("hgpu2." + token_text(TOKEN)[6:], "starts with"),
        ("hgpu1." + "A" * 5000, "starts with"),
        (token_text(TOKEN)[:-9], "cut off or altered"),
        (token_text(TOKEN) + "!", "cut off or altered"),
        ("hgpu1.", "cut off or altered"),
        (with_changes(role="king"), "cut off or altered"),
        (with_changes(extra=1), "cut off or altered"),
        (with_changes(addresses=[]), "names no address"),
        (with_changes(addresses=["nowhere"]), "'nowhere' is not host:port"),
        (with_changes(addresses=["user@host:1"]), "is not host:port"),
        (with_changes(authority="abc"), "authority is not a digest"),
        (with_changes(id="../../../etc"), "id or secret is malformed"),
        (with_changes(secret="short"), "id or secret is malformed"),
    ],
)
def test_a_broken_token_is_refused_with_its_fault(text: str, problem: str) -> None:
    with pytest.raises(HyperGPUError, match=problem) as failure:
        parse_token(text)
    assert failure.value.reason is Reason.TOKEN_INVALID


def test_no_refusal_shows_the_secret() -> None:
    with pytest.raises(HyperGPUError) as failure:
        parse_token(with_changes(id="x"))
    assert TOKEN.secret not in str(failure.value)


def test_a_credential_survives_the_metadata() -> None:
    assert parse_authorization(authorization(TOKEN)) == Credential(TOKEN.id, TOKEN.secret)


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer x", "Basic a.b", "Bearer 0123456789ab."])
def test_other_metadata_is_refused(value: str) -> None:
    with pytest.raises(HyperGPUError, match="Bearer ID"):
        parse_authorization(value)


NOW_S = 1_900_000_000
NODE = NodeId("0x" + "a1" * 20)
OTHER = NodeId("0x" + "b2" * 20)
ANY = frozenset(Role)
JOIN = TokenGrant(role=Role.NODE, ttl_s=3600, uses=1, label="lab")


@pytest.fixture
def journal(tmp_path: Path) -> FolderJournal:
    return FolderJournal(tmp_path)


@pytest.fixture
def tokens(journal: FolderJournal) -> IssuedTokens:
    return IssuedTokens(journal)


def create_token(tokens: IssuedTokens, **changes: Any) -> Token:
    grant = replace(JOIN, **changes)
    return tokens.create(
        grant, addresses=("host:7700",), authority=digest_of(b"authority"), now_s=NOW_S
    )


def credential(token: Token) -> Credential:
    return Credential(token.id, token.secret)


def refusal(reason: Reason) -> pytest.RaisesExc[HyperGPUError]:
    return pytest.RaisesExc(HyperGPUError, check=lambda error: error.reason is reason)


def test_a_token_opens_its_own_door(tokens: IssuedTokens) -> None:
    token = create_token(tokens, role=Role.USER)
    record = tokens.check(credential(token), frozenset({Role.USER, Role.OPERATOR}), NOW_S)
    assert (record.token_id, record.role, record.label) == (token.id, Role.USER, "lab")


def test_the_journal_never_sees_a_secret(tokens: IssuedTokens, journal: FolderJournal) -> None:
    token = create_token(tokens)
    assert token.secret.encode() not in repr(journal.tokens()).encode()


def test_tokens_survive_a_restart(tokens: IssuedTokens, journal: FolderJournal) -> None:
    token = create_token(tokens)
    assert IssuedTokens(journal).check(credential(token), ANY, NOW_S).token_id == token.id
    assert [record.token_id for record in IssuedTokens(journal).tokens()] == [token.id]


def test_a_wrong_secret_and_an_unknown_id_get_the_same_answer(tokens: IssuedTokens) -> None:
    token = create_token(tokens)
    answers = set()
    for credential in (
        Credential(token.id, token.secret[::-1]),
        Credential(TokenId("0" * 12), token.secret),
        Credential(create_token(tokens).id, token.secret),
    ):
        with refusal(Reason.TOKEN_INVALID) as failure:
            tokens.check(credential, ANY, NOW_S)
        answers.add(str(failure.value))
    assert len(answers) == 1


def test_another_role_is_refused_by_name(tokens: IssuedTokens) -> None:
    token = create_token(tokens, role=Role.USER)
    with pytest.raises(HyperGPUError, match="takes the role operator, not user"):
        tokens.check(credential(token), frozenset({Role.OPERATOR}), NOW_S)


def test_an_expired_token_is_refused(tokens: IssuedTokens) -> None:
    token = create_token(tokens, role=Role.USER, ttl_s=10)
    tokens.check(credential(token), ANY, NOW_S + 9)
    with refusal(Reason.TOKEN_EXPIRED):
        tokens.check(credential(token), ANY, NOW_S + 10)


def test_who_joined_with_a_token_reads_with_it_until_it_is_revoked(tokens: IssuedTokens) -> None:
    token = create_token(tokens, ttl_s=10)
    tokens.spend(credential(token), NODE, NOW_S)
    assert tokens.check(credential(token), ANY, NOW_S + 999).uses_left == 0
    tokens.check_current(token.id, NOW_S + 999)
    tokens.revoke(token.id)
    with refusal(Reason.TOKEN_REVOKED):
        tokens.check(credential(token), ANY, NOW_S)


def test_a_token_without_a_lifetime_never_expires(tokens: IssuedTokens) -> None:
    tokens.check(credential(create_token(tokens, ttl_s=0)), ANY, NOW_S * 2)


def test_a_revoked_token_is_refused_after_a_restart_too(
    tokens: IssuedTokens, journal: FolderJournal
) -> None:
    token = create_token(tokens)
    tokens.revoke(token.id)
    for after in (tokens, IssuedTokens(journal)):
        with refusal(Reason.TOKEN_REVOKED):
            after.check(credential(token), ANY, NOW_S)


def test_revoking_an_unknown_token_says_so(tokens: IssuedTokens) -> None:
    with refusal(Reason.TOKEN_UNKNOWN):
        tokens.revoke(TokenId("0" * 12))


def test_a_single_use_token_lets_one_node_join(tokens: IssuedTokens) -> None:
    token = create_token(tokens)
    assert tokens.spend(credential(token), NODE, NOW_S).uses_left == 0
    with refusal(Reason.TOKEN_USED_UP):
        tokens.spend(credential(token), OTHER, NOW_S)


def test_a_node_whose_answer_was_lost_joins_again_with_the_same_token(
    tokens: IssuedTokens, journal: FolderJournal
) -> None:
    token = create_token(tokens, ttl_s=10)
    tokens.spend(credential(token), NODE, NOW_S)
    assert IssuedTokens(journal).spend(credential(token), NODE, NOW_S + 999).token_id == token.id


def test_a_node_that_joined_is_locked_out_by_revoking_its_token(tokens: IssuedTokens) -> None:
    token = create_token(tokens)
    tokens.spend(credential(token), NODE, NOW_S)
    tokens.revoke(token.id)
    with refusal(Reason.TOKEN_REVOKED):
        tokens.spend(credential(token), NODE, NOW_S)


def test_an_expired_token_lets_no_new_node_join(tokens: IssuedTokens) -> None:
    token = create_token(tokens, ttl_s=10)
    with refusal(Reason.TOKEN_EXPIRED):
        tokens.spend(credential(token), NODE, NOW_S + 10)


def test_a_users_token_lets_no_node_join(tokens: IssuedTokens) -> None:
    with refusal(Reason.ROLE_FORBIDDEN):
        tokens.spend(credential(create_token(tokens, role=Role.USER)), NODE, NOW_S)


@pytest.mark.parametrize("changes", [{"ttl_s": -1}, {"uses": -1}])
def test_a_grant_below_nothing_is_refused(tokens: IssuedTokens, changes: dict[str, int]) -> None:
    with refusal(Reason.REQUEST_INVALID):
        create_token(tokens, **changes)


def node_record() -> NodeRecord:
    return NodeRecord(NODE, bytes(64), b"{}", "0.1.0", 1, 1)


def test_a_stranger_with_a_certificate_is_turned_away(journal: FolderJournal) -> None:
    with refusal(Reason.NODE_UNKNOWN):
        KnownNodes(journal).check(NODE)


def test_a_node_that_joined_passes_after_a_restart_too(journal: FolderJournal) -> None:
    nodes = KnownNodes(journal)
    nodes.admit(node_record())
    nodes.check(NODE)
    KnownNodes(journal).check(NODE)


def test_a_revoked_node_is_turned_away_even_when_it_joins_again(journal: FolderJournal) -> None:
    nodes = KnownNodes(journal)
    nodes.admit(node_record())
    nodes.revoke(NODE)
    nodes.admit(node_record())
    for check in (nodes.check, nodes.check_not_revoked, KnownNodes(journal).check):
        with refusal(Reason.NODE_REVOKED):
            check(NODE)


def test_a_readmitted_node_passes(journal: FolderJournal) -> None:
    nodes = KnownNodes(journal)
    nodes.admit(node_record())
    nodes.revoke(NODE)
    nodes.readmit(NODE)
    nodes.check(NODE)


def test_revoking_an_unknown_node_is_refused(journal: FolderJournal) -> None:
    with refusal(Reason.NODE_UNKNOWN):
        KnownNodes(journal).revoke(NODE)


def test_a_peer_gets_its_burst_and_then_one_an_interval() -> None:
    limiter = RateLimiter(Rate(burst=3, interval_ms=Milliseconds(100)), peers_max=2)
    assert [limiter.take("peer", Milliseconds(1000)) for _ in range(4)] == [True] * 3 + [False]
    assert not limiter.take("peer", Milliseconds(1099))
    assert limiter.wait_ms("peer", Milliseconds(1099)) == 1
    assert limiter.take("peer", Milliseconds(1100))
    assert all(limiter.take(other, Milliseconds(1100)) for other in "ab")
    assert limiter.wait_ms("peer", Milliseconds(1100)) == 0


def wrong_secrets(guesses: GuessLimiter, token_id: str, tries: int) -> list[Reason]:
    """What each of some wrong secrets is told."""
    reasons = []
    for _ in range(tries):
        with (
            pytest.raises(HyperGPUError) as failure,
            guesses.count_failures({Reason.TOKEN_INVALID: token_id}),
        ):
            raise HyperGPUError(Reason.TOKEN_INVALID, "the token's id or secret is wrong")
        reasons.append(failure.value.reason)
    return reasons


def test_wrong_secrets_of_one_token_are_told_to_wait_and_no_other_token_is() -> None:
    guesses = GuessLimiter()
    reasons = wrong_secrets(guesses, "0123456789ab", GUESSES.burst + 5)
    assert reasons == [Reason.TOKEN_INVALID] * GUESSES.burst + [Reason.RATE_LIMITED] * 5
    assert wrong_secrets(guesses, "ba9876543210", 1) == [Reason.TOKEN_INVALID]


def test_a_right_secret_passes_however_often_others_guessed(tokens: IssuedTokens) -> None:
    guesses, token = GuessLimiter(), create_token(tokens, role=Role.USER)
    wrong_secrets(guesses, token.id, 1000)
    with guesses.count_failures({Reason.TOKEN_INVALID: token.id}):
        assert tokens.check(credential(token), ANY, NOW_S).token_id == token.id


def test_who_guesses_is_told_how_long_to_wait() -> None:
    guesses = GuessLimiter()
    for _ in range(GUESSES.burst):
        guesses.count("0123456789ab", Milliseconds(5000))
    with pytest.raises(HyperGPUError, match="wait 6000 ms") as failure:
        guesses.count("0123456789ab", Milliseconds(5000))
    assert failure.value.reason is Reason.RATE_LIMITED
    guesses.count("0123456789ab", Milliseconds(11_000))


def test_a_thousand_guesses_a_second_cost_a_thousandth_of_a_processor_each(
    tokens: IssuedTokens,
) -> None:
    guesses, token = GuessLimiter(), create_token(tokens)
    wrong = Credential(token.id, token.secret[::-1])
    tries, begun_s = 2000, time.thread_time()
    for number in range(tries):
        # Half of them name ids of no token: memory is bounded for those, too.
        shown_credential = (
            wrong if number % 2 else Credential(TokenId(f"{number:012d}"), wrong.secret)
        )
        with (
            pytest.raises(HyperGPUError),
            guesses.count_failures({Reason.TOKEN_INVALID: shown_credential.token_id}),
        ):
            tokens.check(shown_credential, ANY, NOW_S)
    assert (time.thread_time() - begun_s) / tries < 0.001


def test_an_open_stream_takes_a_place_until_it_ends() -> None:
    streams = OpenCounter(2, "streams")
    with streams.hold("node"), streams.hold("node"):
        with pytest.raises(HyperGPUError, match="node has 2 streams open") as failure:
            streams.hold("node").__enter__()
        assert failure.value.reason is Reason.LIMIT_REACHED
        with streams.hold("other"):
            pass
    with streams.hold("node"):
        pass


def test_revoking_a_join_line_shuts_out_every_node_that_came_by_it_also_after_a_restart(
    tokens: IssuedTokens, journal: FolderJournal
) -> None:
    line, other = create_token(tokens, uses=8), create_token(tokens)
    nodes = KnownNodes(journal)
    for node, token in ((NODE, line), (OTHER, other)):
        tokens.spend(credential(token), node, NOW_S)
        nodes.admit(replace(node_record(), node=node))
    revoked_nodes = tokens.revoke(line.id)
    assert revoked_nodes == {NODE}
    nodes.learn_revoked(revoked_nodes)
    for after in (nodes, KnownNodes(journal)):
        with refusal(Reason.NODE_REVOKED):
            after.check(NODE)
        after.check(OTHER)
    nodes.readmit(NODE)
    KnownNodes(journal).check(NODE)


def test_log_lines_about_one_node_are_limited_counted_and_never_its_errors() -> None:
    limiter = LineLimiter()
    for _ in range(LINES.burst):
        limiter(None, "info", {"event": "a node is connected", "node": NODE})
    for _ in range(7):
        with pytest.raises(structlog.DropEvent):
            limiter(None, "info", {"event": "a node is connected", "node": NODE})
    for method, event in (("error", {"node": NODE}), ("info", {"node": OTHER}), ("info", {})):
        assert limiter(None, method, dict(event)) == event
