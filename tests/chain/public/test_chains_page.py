"""docs/chains.md, command by command, on a chain that nobody has described."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.house.tree import ROOT
from hypergpu.chain.profiles import chain_profile, profile_names
from hypergpu.chain.profiles.cautious import cautious_profile
from tests.chain.misbehaving_rpc import MisbehavingRpc, misbehaving
from tests.chain.public.faucet import CHAIN_ID, Faucet, environment, public_chain

PAGE = (ROOT / "docs/chains.md").read_text("utf-8")
JOB_FILE = PAGE.split("```toml\n")[1].split("```")[0]
NODES = 2
BOND, ESCROW = 1_000_000, 6_400_000 * NODES
SOMEBODY, SOMEBODY_ELSE = "0x" + "a1" * 20, "0x" + "b2" * 20
JOINED_WITHIN_S = 240.0
PAID_WITHIN_S = 240.0
DEEP = 65
"""Blocks at once: one more than makes something final."""


def commands() -> list[str]:
    """Every line that the page has people run, the first two aside, which are their own."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return "".join(blocks).splitlines()[2:]


class Reader:
    """Somebody who does what the page says, each line in one shell after another."""

    def __init__(self, folder: Path, faucet: Faucet, rpc: MisbehavingRpc) -> None:
        self.folder = folder
        self.faucet = faucet
        self.said: dict[str, str] = {}
        self._exports: list[str] = []
        named = {"TOKEN": faucet.token, "ARBITER": SOMEBODY, "TREASURY": SOMEBODY_ELSE}
        self._environment = environment(folder) | {"RPC": rpc.url} | named
        self._children: list[subprocess.Popen[str]] = []

    def ran(self, line: str) -> str:
        """Run a line to its end; what it printed."""
        if line.startswith("export "):
            self._exports.append(line)
            return ""
        ended = subprocess.run(
            self._shell(line),
            capture_output=True,
            check=False,
            text=True,
            timeout=240,
            env=self._environment,
            cwd=self.folder,
        )
        assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"
        self.said[line] = ended.stdout + ended.stderr
        return ended.stdout

    def know(self, name: str, value: str) -> None:
        """Set what the page calls by a name."""
        self._environment[name] = value

    def started(self, line: str) -> subprocess.Popen[str]:
        """Start what goes on in the foreground of a terminal of its own."""
        with (self.folder / f"{len(self._children)}.err").open("w", encoding="utf-8") as errors:
            child = subprocess.Popen(
                self._shell(f"exec {line}"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self._environment,
                cwd=self.folder,
            )
        self._children.append(child)
        return child

    def up(self, line: str) -> None:
        """Start the coordinator, and nodes with what it prints."""
        child = self.started(f"{line} --listen 127.0.0.1 --port 0 --node-port 0")
        printed, token = [], ""
        for each in child.stdout or ():
            printed.append(each)
            if each.strip().startswith("hypergpu join "):
                token = each.split()[-1]
                break
        self.said[line] = "".join(printed)
        for number in range(NODES):
            node = self.started(f"hypergpu join - --worker numpy --state-dir node-{number}")
            assert node.stdin is not None
            node.stdin.write(f"{token}\n")
            node.stdin.close()
        deadline_s = time.monotonic() + JOINED_WITHIN_S
        while len(json.loads(self.ran("hypergpu node ls --json"))["nodes"]) < NODES:
            assert time.monotonic() < deadline_s

    def paid(self, line: str) -> dict[str, Any]:
        """Let the chain go on until the job is paid; what `ledger show` says then."""
        deadline_s = time.monotonic() + PAID_WITHIN_S
        view: dict[str, Any] = {}
        while time.monotonic() < deadline_s:
            view = json.loads(self.ran(f"{line} --json"))
            earned = [node["earned"] for node in view["nodes"]]
            is_settled = view["is_over"] and not view["unmeasured_rounds"]
            if is_settled and [node["paid"] for node in view["nodes"]] == earned:
                return view
            self.faucet.mine(DEEP, apart_s=60)
        raise AssertionError(view)

    def end(self) -> None:
        """Ask everything to end that goes on."""
        for child in reversed(self._children):
            child.send_signal(signal.SIGTERM)
            child.wait(240)
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    stream.close()

    def _shell(self, line: str) -> list[str]:
        return ["bash", "-c", "\n".join([*self._exports, line])]


@contextmanager
def reader_on(folder: Path) -> Iterator[tuple[Reader, MisbehavingRpc]]:
    """A reader with a chain before him, whose every question to it is noted."""
    with public_chain(folder, block_time_s=1) as (anvil, faucet), misbehaving(anvil.url) as rpc:
        reader = Reader(folder, faucet, rpc)
        try:
            yield reader, rpc
        finally:
            reader.end()


def test_the_page_leads_from_an_empty_key_to_a_paid_job(tmp_path: Path) -> None:
    (tmp_path / "paid.toml").write_text(JOB_FILE, "utf-8")
    view: dict[str, Any] = {}
    with reader_on(tmp_path) as (reader, rpc):
        for line in commands():
            printed = ""
            if line.startswith("hypergpu up"):
                reader.up(line)
            elif line.startswith("hypergpu ledger show"):
                view = reader.paid(line)
            else:
                printed = reader.ran(line)
            if line == "hypergpu ledger key":
                reader.faucet.give(printed.strip(), 10**18)
                reader.faucet.give_tokens(printed.strip(), BOND + ESCROW)
            elif found := re.search(r"the ledger is at (0x[0-9a-f]{40}) on chain 4242", printed):
                reader.know("LEDGER", found[1])
        # The job starts with one node, and its escrow is for both.
        assert (len(view["nodes"]), view["escrow"]) == (NODES, str(ESCROW))
        for node in view["nodes"]:
            assert int(node["paid"]) == int(node["earned"]) > 0
            assert reader.faucet.tokens_of(node["id"]) == int(node["paid"])
        assert view["chain_id"] == CHAIN_ID
        assert "chain 4242 has no profile; assumed: block_ms = 12000" in reader.said["hypergpu up"]
        assert "the bond is 1000000 (1.000000)" in reader.said["hypergpu ledger bond"]
        assert [line for line in commands() if line.startswith("hypergpu ledger verify")]
        asked = {method for calls in rpc.asked for method in calls}
        assert {method for method in asked if not method.startswith("eth_")} == set()
        spent_wei = 10**18 - reader.faucet.chain.balance_wei(bytes.fromhex(view["coordinator"][2:]))
        assert 0 < spent_wei < 10**17


@pytest.mark.parametrize("name", profile_names())
def test_the_page_says_when_each_chains_blocks_are_final(name: str) -> None:
    profile = chain_profile(name)
    if profile.is_local:
        return
    assert f"| `{name}` | {figures(profile)} |" in PAGE


def test_the_page_says_what_is_assumed_of_any_other() -> None:
    assert f"| any other, by its address | {figures(cautious_profile(1))} |" in PAGE


def figures(profile: Any) -> str:
    block_s, depth = profile.block_ms / 1000, profile.depth
    return f"{block_s:g} s | {depth} blocks | {block_s * depth:g} s | {profile.window_s} s"
