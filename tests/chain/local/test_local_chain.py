"""A local chain that keeps ending: what is said of it, and that it is there again in the end."""

import os
import signal
from pathlib import Path

import pytest

from coordinator.shell.metering.local_chain import LOG_FILE, LocalChain
from hypergpu.chain.local.anvil import VARIABLE, anvil_program
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import HttpRpc
from hypergpu.chain.rpc.transport import HttpTransport

CHAIN_ID = 31337


def test_a_chain_that_does_not_start_again_says_so_and_is_tried_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.symlink_to(anvil_program())
    monkeypatch.setenv(VARIABLE, str(program))
    provided: list[int] = []
    local = LocalChain(
        tmp_path, CHAIN_ID, port=0, provide=lambda chain: provided.append(chain.chain_id())
    )
    local.start()
    assert (local.complaint, provided) == ("", [])
    program.unlink()
    local._anvil.kill()
    while "does not start again" not in local.complaint:
        os.sched_yield()
    assert local.complaint.startswith("the local chain ended and does not start again: Anvil did")

    monkeypatch.delenv(VARIABLE)
    is_there_again(local)
    assert provided == [CHAIN_ID]
    local.stop()


def is_there_again(local: LocalChain) -> None:
    while local.complaint:
        os.sched_yield()
    chain = EvmChain(HttpRpc(HttpTransport(local.url)))
    assert chain.chain_id() == CHAIN_ID
    chain.rpc.close()


def test_a_chain_that_was_killed_is_told_of_until_its_coordinator_has_what_it_needs(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    local = LocalChain(
        tmp_path, CHAIN_ID, port=0, provide=lambda _chain: said.append(local.complaint)
    )
    local.start()
    process = local._anvil._process
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)
    while not said:
        os.sched_yield()
    is_there_again(local)
    local.stop()
    assert said == ["the local chain ended by itself; it is started again with its kept state"]


def test_a_chain_whose_log_cannot_be_written_is_tried_until_it_can(tmp_path: Path) -> None:
    local = LocalChain(tmp_path, CHAIN_ID, port=0, provide=lambda _chain: None)
    local.start()
    log = tmp_path / LOG_FILE
    log.unlink()
    log.mkdir()
    local._anvil.kill()
    while "does not start again" not in local.complaint:
        os.sched_yield()
    assert str(log) in local.complaint
    log.rmdir()
    is_there_again(local)
    local.stop()
