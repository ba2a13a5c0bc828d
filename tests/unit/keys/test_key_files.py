"""Keys in real files: made, opened, taken over, and every way in which that goes wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from eth_account import Account

from hypergpu.crypto import IdentityKey
from hypergpu.errors import HyperGPUError
from hypergpu.keys import (
    TERMINAL,
    Passphrase,
    change_passphrases,
    decrypt_key,
    encrypt_key,
    kept_passphrase,
    keystore_of,
    made_passphrase,
    passphrase_of_file,
    passphrase_of_text,
    stored_address,
    stored_secret,
)

KEY = IdentityKey(bytes.fromhex("ac0974bec39a17e36ba4a6b4d238ff944bacb478cbed5efcae784d7bf4f2ff80"))
WORDS = "correct horse battery staple"


def light(text: str = WORDS) -> Passphrase:
    """A passphrase that is stretched as one that was made."""
    return Passphrase(text.encode(), "the test", is_made=True)


def content(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(path.read_bytes())
    return tree


def test_a_key_is_made_once_and_lies_there_encrypted(tmp_path: Path) -> None:
    path = tmp_path / "key"
    secret = stored_secret(path, light())
    assert stored_secret(path, light()) == secret
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret.hex() not in path.read_text()
    assert content(path)["address"] == IdentityKey(secret).node_id[2:]
    assert [child.name for child in tmp_path.iterdir()] == ["key"]


def test_wallets_open_our_keystores_and_we_open_theirs() -> None:
    ours = json.loads(encrypt_key(KEY.secret, light()))
    assert Account.decrypt(ours, WORDS) == KEY.secret
    theirs = json.dumps(Account.encrypt(KEY.secret, WORDS, kdf="scrypt", iterations=4096))
    keystore = keystore_of(theirs.encode(), source="theirs")
    assert decrypt_key(keystore, light(), source="theirs") == KEY.secret


def test_a_passphrase_that_somebody_thought_up_is_stretched_as_wallets_do(tmp_path: Path) -> None:
    thought_up = passphrase_of_text(WORDS, "the test")
    secret = stored_secret(tmp_path / "key", thought_up)
    assert content(tmp_path / "key")["crypto"]["kdfparams"]["n"] == 1 << 18
    assert Account.decrypt(content(tmp_path / "key"), WORDS) == secret


def test_a_key_tells_its_address_without_its_passphrase(tmp_path: Path) -> None:
    path = tmp_path / "key"
    secret = stored_secret(path, light())
    assert stored_address(path) == IdentityKey(secret).node_id
    path.unlink()
    with pytest.raises(HyperGPUError, match="No such file"):
        stored_address(path)


def test_another_passphrase_is_refused_and_said_where_it_came_from(tmp_path: Path) -> None:
    stored_secret(tmp_path / "key", light())
    wrong = Passphrase(b"wrong", "/etc/passphrase", is_made=False)
    with pytest.raises(
        HyperGPUError, match=r"from /etc/passphrase does not open .*/key"
    ) as failure:
        stored_secret(tmp_path / "key", wrong)
    assert "wrong" not in str(failure.value)


def test_a_passphrase_can_be_changed(tmp_path: Path) -> None:
    secret = stored_secret(tmp_path / "key", light())
    change_passphrases([tmp_path / "key"], light(), light("another"))
    assert stored_secret(tmp_path / "key", light("another")) == secret
    with pytest.raises(HyperGPUError, match="does not open"):
        change_passphrases([tmp_path / "key"], light(), light("another"))


def keystore_with(**parts: Any) -> bytes:
    keystore = json.loads(encrypt_key(KEY.secret, light()))
    for name, value in parts.items():
        holder = keystore
        *path, last = name.split("__")
        for step in path:
            holder = holder[step]
        holder[last] = value
    return json.dumps(keystore).encode()


DAMAGED = {
    "empty": (b"", "it is no keystore"),
    "zeros": (bytes(64), "it is no keystore"),
    "no hex": (b"zz" * 32, "it is no keystore"),
    "too large": (b"{" * 9000, "at most 8192 are read"),
    "older": (keystore_with(version=2), "of version, kdf and cipher"),
    "another stretching": (keystore_with(crypto__kdf="pbkdf2"), "of version, kdf and cipher"),
    "no power of two": (keystore_with(crypto__kdfparams__n=3), "out of range"),
    "much memory": (keystore_with(crypto__kdfparams__n=1 << 30), "more than 512 MiB"),
    "much time": (keystore_with(crypto__kdfparams__p=10**9), "out of range"),
    "salt": (keystore_with(crypto__kdfparams__salt="zz"), "it is no keystore"),
    "long": (keystore_with(crypto__ciphertext="00" * 500), "not that of a 32-byte key"),
    "iv": (keystore_with(crypto__cipherparams__iv="00"), "not that of a 32-byte key"),
    "another's address": (keystore_with(address="00" * 20), "holds the key of 0xf39f"),
    "other ciphertext": (keystore_with(crypto__ciphertext="00" * 32), "does not open"),
    "other mac": (keystore_with(crypto__mac="00"), "does not open"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_key_is_refused_with_what_is_wrong(tmp_path: Path, damage: str) -> None:
    damaged_bytes, why = DAMAGED[damage]
    path = tmp_path / "key"
    path.write_bytes(damaged_bytes)
    path.chmod(0o600)
    with pytest.raises(HyperGPUError, match=why):
        stored_secret(path, light())
    assert path.read_bytes() == damaged_bytes


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    stored_secret(path, light())
    path.chmod(0o644)
    with pytest.raises(HyperGPUError, match=r"others can read the key .*\(mode 644\)") as failure:
        stored_secret(path, light())
    assert failure.value.fix == f"chmod 600 {path}"


def test_a_passphrase_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "passphrase"
    new_passphrase = made_passphrase(path)
    assert new_passphrase.is_made
    assert len(new_passphrase.octets) == 64
    assert made_passphrase(path).octets == kept_passphrase(path).octets == new_passphrase.octets
    assert path.stat().st_mode & 0o777 == 0o600
    assert new_passphrase.octets.decode() not in repr(new_passphrase)


def test_where_no_passphrase_can_be_kept_the_fix_is_named(tmp_path: Path) -> None:
    with pytest.raises(HyperGPUError, match="no passphrase can be kept in") as failure:
        made_passphrase(tmp_path / "missing" / "passphrase")
    assert "--passphrase-file" in failure.value.fix


def test_a_passphrase_from_a_file_is_its_text(tmp_path: Path) -> None:
    path = tmp_path / "passphrase"
    path.write_text(f" {WORDS}\n")
    path.chmod(0o600)
    assert passphrase_of_file(path).octets == WORDS.encode()
    assert not passphrase_of_file(path).is_made


@pytest.mark.parametrize(
    ("octets", "mode", "why"),
    [
        (b"\n", 0o600, "has 0 bytes"),
        (b"x" * 5000, 0o600, "has 4098 bytes"),
        (b"\xff\xfe", 0o600, "is no text"),
        (b"words", 0o640, "others can read the passphrase"),
    ],
)
def test_a_file_that_holds_no_passphrase_is_refused(
    tmp_path: Path, octets: bytes, mode: int, why: str
) -> None:
    path = tmp_path / "passphrase"
    path.write_bytes(octets)
    path.chmod(mode)
    with pytest.raises(HyperGPUError, match=why):
        passphrase_of_file(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HyperGPUError, match="cannot be read: No such file"):
        passphrase_of_file(tmp_path / "missing")


ASK = """
import sys
from pathlib import Path
from hypergpu.keys import passphrase_of_file
from hypergpu.errors import HyperGPUError
try:
    print(len(passphrase_of_file(Path("-")).octets))
except HyperGPUError as refused:
    print(refused.detail)
"""


def test_nobody_is_asked_where_there_is_no_terminal() -> None:
    command = [sys.executable, "-c", ASK]
    answer = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
        start_new_session=True,
    )
    assert answer.stdout.strip() == b"there is no terminal to ask for the passphrase on"


def test_a_terminal_is_asked_and_shows_nothing_of_it() -> None:
    ours, theirs = os.openpty()
    asker = subprocess.Popen(
        ["setsid", "--ctty", "--wait", sys.executable, "-c", ASK],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    output = b""
    while b"Passphrase of the key: " not in output:
        output += os.read(ours, 1024)
    os.write(ours, WORDS.encode() + b"\n")
    while str(len(WORDS)).encode() not in output:
        output += os.read(ours, 1024)
    assert asker.wait() == 0
    os.close(ours)
    assert WORDS.encode() not in output


def test_the_terminal_has_a_name_of_its_own() -> None:
    assert Path("-") == TERMINAL
