"""Keys of the API: kept as hashes, bound to models, tokens and time."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.user.serving.api_keys import ApiKeys


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    return ApiKeys(tmp_path / "keys" / "keys.sqlite")


def test_a_key_is_found_by_its_text_alone_and_its_secret_is_nowhere(
    keys: ApiKeys, tmp_path: Path
) -> None:
    new_key = keys.add("laptop")
    path = tmp_path / "keys" / "keys.sqlite"
    key = keys.check(new_key.key)
    assert key is not None
    assert (key.id, key.name) == (new_key.id, "laptop")
    assert keys.check(new_key.key + "x") is None
    assert new_key.key.encode() not in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_revoked_key_is_good_no_more_and_stays_in_the_list(keys: ApiKeys) -> None:
    new_key = keys.add("laptop")
    keys.revoke("laptop")
    assert keys.check(new_key.key) is None
    assert not keys.is_good(new_key.id)
    assert [key.is_revoked for key in keys.all()] == [True]


def test_a_name_that_two_keys_have_revokes_neither(keys: ApiKeys) -> None:
    keys.add("a")
    keys.add("a")
    with pytest.raises(HyperGPUError, match="2 keys have the id or name 'a'"):
        keys.revoke("a")
    assert all(key.is_good for key in keys.all())


def test_a_key_may_be_bound_to_models(keys: ApiKeys) -> None:
    key = keys.check(keys.add(models=("tiny", "small")).key)
    assert key is not None
    assert (key.may_call("tiny"), key.may_call("large")) == (True, False)


def test_answers_at_once_cannot_use_a_budget_twice(keys: ApiKeys) -> None:
    new_key = keys.add(tokens_most=100)
    with ThreadPoolExecutor(8) as pool:
        uses = [*pool.map(lambda _: keys.use(new_key.id, 30), range(8))]
    assert sum(uses) == 3
    assert keys.use(new_key.id, -50)
    assert [key.tokens_used for key in keys.all()] == [40]
    keys.exhaust(new_key.id)
    assert not keys.use(new_key.id, 1)


def test_a_key_ends(keys: ApiKeys, tmp_path: Path) -> None:
    new_key = keys.add(lasts_s=3600)
    assert keys.check(new_key.key) is not None
    with sqlite3.connect(tmp_path / "keys" / "keys.sqlite") as table:
        table.execute("UPDATE keys SET ends_unix_s = 1")
    assert keys.check(new_key.key) is None


def test_a_file_that_is_no_table_of_keys_is_told(tmp_path: Path) -> None:
    path = tmp_path / "keys.sqlite"
    path.write_bytes(b"something else, and long enough to be read" * 40)
    with pytest.raises(HyperGPUError, match="move the file away"):
        ApiKeys(path)
    assert path.read_bytes().startswith(b"something else")


def test_a_file_of_a_version_before_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "keys.sqlite"
    ApiKeys(path).add("laptop")
    with sqlite3.connect(path) as table:
        table.execute("ALTER TABLE keys DROP COLUMN calls_per_minute")
    keys = ApiKeys(path)
    keys.add("phone", calls_per_minute=30)
    assert [key.calls_per_minute for key in keys.all()] == [None, 30]


def test_a_key_has_a_priority_and_one_of_a_version_before_the_usual_one(tmp_path: Path) -> None:
    path = tmp_path / "keys.sqlite"
    ApiKeys(path).add("laptop")
    with sqlite3.connect(path) as table:
        table.execute("ALTER TABLE keys DROP COLUMN priority")
    keys = ApiKeys(path)
    made_key = keys.add("phone", priority=7)
    assert [key.priority for key in keys.all()] == [0, 7]
    key = keys.check(made_key.key)
    assert key is not None
    assert key.priority == 7
