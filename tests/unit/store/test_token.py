import base64

import msgspec
import pytest

from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, TokenId
from hypergpu.wire.token import (
    Credential,
    Role,
    Token,
    authorization,
    parse_authorization,
    parse_token,
    token_text,
)

TOKEN = Token(
    addresses=("train.example.org:7700", "[2001:db8::1]:7700", "10.0.0.1:7700"),
    authority=digest_of(b"authority"),
    role=Role.NODE,
    id=TokenId("0123456789ab"),
    secret="s3cret_s3cret-s3cret_s3cret-s3cret",
)


def with_changes(**fields: object) -> str:
    packed = msgspec.json.encode(msgspec.to_builtins(TOKEN) | fields)
    return "hgpu1." + base64.urlsafe_b64encode(packed).rstrip(b"=").decode()


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
    with pytest.raises(HyperGPUError, match=problem) as caught:
        parse_token(text)
    assert caught.value.reason is Reason.TOKEN_INVALID


def test_no_refusal_shows_the_secret() -> None:
    with pytest.raises(HyperGPUError) as caught:
        parse_token(with_changes(id="x"))
    assert TOKEN.secret not in str(caught.value)


def test_a_credential_survives_the_metadata() -> None:
    assert parse_authorization(authorization(TOKEN)) == Credential(TOKEN.id, TOKEN.secret)


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer x", "Basic a.b", "Bearer 0123456789ab."])
def test_other_metadata_is_refused(value: str) -> None:
    with pytest.raises(HyperGPUError, match="Bearer ID"):
        parse_authorization(value)
