import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.keys import Passphrase, passphrase_beside, passphrase_of_file, stored_secret
from hypergpu.wire.credentials import token_text
from tests.integration.node.fake_coordinator import Served, serve
from tests.processes import ENVIRONMENT


@asynccontextmanager
async def node(folder: Path, *arguments: str, **environment: str) -> AsyncIterator[Process]:
    """`python -m gpu_node` over a state folder; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gpu_node", *arguments),
        env={
            **ENVIRONMENT,
            "HYPERGPU_NODE_STATE_DIR": str(folder),
            "HYPERGPU_NODE_WORKER": "null",
            **environment,
        },
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def wait_for_end(process: Process, stdin: str = "") -> tuple[int, str]:
    """Exit status and what was written, both streams together."""
    async with asyncio.timeout(240):
        out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return process.returncode, (out + err).decode()


@pytest.fixture
async def there(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path / "authority") as there:
        yield there


async def test_a_node_that_never_joined_is_told_how(tmp_path: Path) -> None:
    async with node(tmp_path / "node", "run") as process:
        status, text = await wait_for_end(process)
    assert status == Reason.NODE_NOT_JOINED.exit_code
    assert "fix: join first: hypergpu-node join --token-file FILE" in text


async def test_a_join_takes_its_token_from_stdin_and_may_end_there(
    there: Served, tmp_path: Path
) -> None:
    async with node(tmp_path / "node", "join", "--only", "--token-file", "-") as process:
        status, text = await wait_for_end(process, token_text(there.token) + "\n")
    assert status == 0
    assert f"joined 127.0.0.1:{there.service.node_port}" in text
    async with node(tmp_path / "node", "show") as process:
        assert there.service.joins[0].capabilities.worker == "null"
        assert "coordinator  127.0.0.1" in (await wait_for_end(process))[1]


@pytest.mark.parametrize("command", [("show",), ("passphrase", "--new", "new.txt")])
async def test_what_only_looks_makes_no_node(tmp_path: Path, command: tuple[str, ...]) -> None:
    async with node(tmp_path / "typo", *command) as process:
        status, text = await wait_for_end(process)
    assert status == Reason.NODE_NOT_JOINED.exit_code
    assert f"there is no node's key in {tmp_path / 'typo'}" in text
    assert not (tmp_path / "typo").exists()


async def test_a_token_of_another_authority_ends_the_daemon(there: Served, tmp_path: Path) -> None:
    there.service.join_error = HyperGPUError(Reason.TOKEN_EXPIRED, "it ran out")
    token = tmp_path / "token"
    token.write_text(token_text(there.token))
    async with node(tmp_path / "node", "join", "--token-file", str(token)) as process:
        status, text = await wait_for_end(process)
    assert status == Reason.TOKEN_EXPIRED.exit_code
    assert "it ran out" in text


async def test_a_first_sigterm_drains_and_leaves_with_status_0(
    there: Served, tmp_path: Path
) -> None:
    async with node(tmp_path / "node", "join", "--token-file", "-") as process:
        assert process.stdin is not None
        process.stdin.write(token_text(there.token).encode() + b"\n")
        await there.service.heartbeat.wait()
        process.send_signal(signal.SIGTERM)
        assert (await there.service.next_said("draining")).reason == "SIGTERM"
        status, text = await wait_for_end(process)
    assert status == 0
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert "Leave" in {line["event"] for line in lines}
    assert there.token.secret not in text


async def test_a_node_that_leaves_drains_and_keeps_its_key(there: Served, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    async with node(folder, "join", "--token-file", "-") as daemon:
        assert daemon.stdin is not None
        daemon.stdin.write(token_text(there.token).encode() + b"\n")
        await there.service.heartbeat.wait()
        async with node(folder, "leave") as leaving_node:
            assert (await there.service.next_said("draining")).reason == "SIGTERM"
            status, text = await wait_for_end(leaving_node)
        assert (await wait_for_end(daemon))[0] == 0
    assert (status, "left 127.0.0.1" in text) == (0, True)
    assert {each.name for each in folder.iterdir()} == {"identity.key", "lock"}
    async with node(folder, "run") as process:
        assert (await wait_for_end(process))[0] == Reason.NODE_NOT_JOINED.exit_code


async def test_a_new_passphrase_opens_the_keys_of_all_devices_or_of_none(tmp_path: Path) -> None:
    root = tmp_path / "node"
    keys = [root / "identity.key", root / "device-2/identity.key", root / "device-3/identity.key"]
    old = passphrase_beside(root, keys[0])
    secrets = [stored_secret(key, old) for key in keys[:2]]
    other = Passphrase(b"x" * 64, "a test", is_made=True)
    stored_secret(keys[2], other)
    new = tmp_path / "new"
    new.write_text("a new one")
    new.chmod(0o600)
    async with node(root, "passphrase", "--new", str(new)) as process:
        status, text = await wait_for_end(process)
    assert status == Reason.FILE_UNUSABLE.exit_code, text
    assert [stored_secret(key, old) for key in keys[:2]] == secrets
    keys[2].unlink()
    async with node(root, "passphrase", "--new", str(new)) as process:
        status, text = await wait_for_end(process)
    assert status == 0, text
    assert [stored_secret(key, passphrase_of_file(new)) for key in keys[:2]] == secrets


async def test_a_node_that_is_to_forget_its_key_leaves_nothing(
    there: Served, tmp_path: Path
) -> None:
    async with node(tmp_path / "node", "join", "--only", "--token-file", "-") as process:
        await wait_for_end(process, token_text(there.token) + "\n")
    async with node(tmp_path / "node", "leave", "--forget-key") as process:
        assert (await wait_for_end(process))[0] == 0
    assert not (tmp_path / "node").exists()
    assert not (tmp_path / "node.passphrase").exists()


async def test_an_unknown_setting_is_named(tmp_path: Path) -> None:
    async with node(tmp_path / "node", "run", "--worker", "abacus") as process:
        status, text = await wait_for_end(process)
    assert status == Reason.ARGUMENT_INVALID.exit_code
    assert "worker: Input should be 'auto'" in text


async def test_a_token_that_was_cut_off_is_refused_without_its_secret(
    there: Served, tmp_path: Path
) -> None:
    whole = token_text(msgspec.structs.replace(there.token, secret="x" * 40))
    async with node(tmp_path / "node", "join", "--token-file", "-") as process:
        status, text = await wait_for_end(process, whole[:-5] + "\n")
    assert status == Reason.TOKEN_INVALID.exit_code
    assert "x" * 10 not in text


async def test_a_sigterm_before_the_worker_is_ready_ends_the_daemon(
    there: Served, tmp_path: Path
) -> None:
    async with node(tmp_path / "node", "join", "--token-file", "-") as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(token_text(there.token).encode() + b"\n")
        async with asyncio.timeout(240):
            assert b"will do work of kind training" in await process.stderr.readline()
            assert b"a worker was started" in await process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        status, _ = await wait_for_end(process)
    assert status == 0


def worker_that(folder: Path, does: str) -> str:
    """The path of Python's modules with which a worker does this before anything else."""
    (folder / "first").mkdir()
    (folder / "first" / "sitecustomize.py").write_text(
        f"import sys\nif 'gpu_node.shell.worker' in sys.orig_argv:\n    {does}\n"
    )
    return f"{folder / 'first'}:{ENVIRONMENT['PYTHONPATH']}"


def held_worker(folder: Path) -> tuple[str, Callable[[], object]]:
    """The same for a worker that waits, and what lets it begin."""
    may_begin = folder / "first" / "may-begin"  # where a sandbox shows it
    path = worker_that(folder, f"open({str(may_begin)!r}).read()")
    os.mkfifo(may_begin)
    return path, lambda: may_begin.write_text("")


async def test_a_node_that_comes_back_dials_in_before_its_worker_is_ready(
    there: Served, tmp_path: Path
) -> None:
    async with node(tmp_path / "node", "join", "--only", "--token-file", "-") as process:
        await wait_for_end(process, token_text(there.token) + "\n")
    capabilities_file = tmp_path / "node" / "worker.json"
    outdated_text = capabilities_file.read_text().replace('"cpu"', '"cuda"')
    capabilities_file.write_text(outdated_text)
    path, begin = held_worker(tmp_path)
    async with node(tmp_path / "node", "run", PYTHONPATH=path):
        early = await there.service.next_said("hello")
        await asyncio.to_thread(begin)
        later = await there.service.next_said("hello")
    assert (early.capabilities.device, early.is_starting) == ("cuda", True)
    assert (later.capabilities.device, later.is_starting) == ("cpu", False)
    assert capabilities_file.read_text() != outdated_text


async def test_a_node_that_comes_back_says_when_its_worker_is_ready(
    there: Served, tmp_path: Path
) -> None:
    async with node(tmp_path / "node", "join", "--only", "--token-file", "-") as process:
        await wait_for_end(process, token_text(there.token) + "\n")
    path, begin = held_worker(tmp_path)
    async with node(tmp_path / "node", "run", PYTHONPATH=path):
        assert (await there.service.next_said("hello")).is_starting
        await asyncio.to_thread(begin)
        await there.service.next_said("worker_ready")


async def test_a_worker_that_hangs_while_it_starts_is_ended(there: Served, tmp_path: Path) -> None:
    async with node(tmp_path / "node", "join", "--only", "--token-file", "-") as process:
        await wait_for_end(process, token_text(there.token) + "\n")
    path = worker_that(tmp_path, "import signal; signal.pause()")
    limit = {"HYPERGPU_NODE_FIRST_PROGRESS_LIMIT_MS": "1000"}
    async with node(tmp_path / "node", "run", PYTHONPATH=path, **limit) as process:
        # A busy machine may come to dialling only after that.
        if (await there.service.next_said("hello")).is_starting:
            await there.service.next_said("worker_ready")
        assert process.stderr is not None
        async with asyncio.timeout(240):
            while b"it was not ready within 1 s" not in await process.stderr.readline():
                pass
