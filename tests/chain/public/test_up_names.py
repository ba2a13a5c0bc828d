"""What `hypergpu up` says of a chain that was named wrongly can be done with `up` itself."""

import subprocess
from pathlib import Path

import pytest

from hypergpu.chain.local.anvil import Anvil, AnvilOptions
from hypergpu.errors import Reason
from tests.chain.public.faucet import CHAIN_ID, environment
from tests.chain.public.test_deploying import PROFILE

NOBODY = "http://127.0.0.1:9"
BY_NAME = "HYPERGPU_CHAIN=NAME HYPERGPU_COORDINATOR_CHAIN_URL=URL"


def up(folder: Path, **variables: str) -> tuple[int, str]:
    """Its exit status and its complaint, of a start that is refused."""
    ended = subprocess.run(
        ["hypergpu", "up", "--plaintext", "--port", "0", "--node-port", "0"],
        capture_output=True,
        check=False,
        text=True,
        timeout=240,
        env=environment(folder) | variables,
        cwd=folder,
    )
    assert ended.stdout == ""
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("named", "reason", "words", "fix"),
    [
        ("mars", Reason.ARGUMENT_INVALID, "there is no chain 'mars'; known by name are", BY_NAME),
        ("./not.toml", Reason.FILE_UNUSABLE, "not.toml: it cannot be read", "docs/chains.md"),
        (NOBODY, Reason.CHAIN_UNREACHABLE, f"RPC at {NOBODY} did not answer", BY_NAME),
        ("ws://127.0.0.1:9", Reason.ARGUMENT_INVALID, "begins with http://", "name it like this"),
    ],
)
def test_up_names_what_it_reads(
    tmp_path: Path, named: str, reason: Reason, words: str, fix: str
) -> None:
    status, told = up(tmp_path, HYPERGPU_CHAIN=named)
    assert status == reason.exit_code
    assert words in told
    assert fix in told.partition(" Fix: ")[2]
    assert "--chain" not in told


def test_up_takes_a_profile_of_ones_own_and_holds_the_chain_against_it(tmp_path: Path) -> None:
    anvil = Anvil(AnvilOptions(chain_id=CHAIN_ID), log=tmp_path / "anvil.log")
    anvil.start()
    (tmp_path / "mine.toml").write_text(PROFILE, "utf-8")
    try:
        url = {"HYPERGPU_COORDINATOR_CHAIN_URL": anvil.url}
        status, told = up(tmp_path, HYPERGPU_CHAIN="./mine.toml", **url)
        assert status == Reason.CHAIN_WRONG.exit_code
        assert f"the RPC at {anvil.url} is of chain 4242, not of 4243" in told
        assert "Fix: name that chain's own RPC: HYPERGPU_COORDINATOR_CHAIN_URL=URL" in told
        (tmp_path / "mine.toml").write_text(PROFILE.replace("4243", "4242"), "utf-8")
        status, told = up(tmp_path, HYPERGPU_CHAIN="./mine.toml", **url)
        assert status == Reason.LEDGER_WRONG.exit_code
        assert "no ledger is named for chain 4242. Fix: name one of this version: " in told
    finally:
        anvil.stop()
