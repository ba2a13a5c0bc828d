"""Files about a chain that are no text: told, or passed over where they only remember."""

import socket
from pathlib import Path

import pytest
from coordinator.shell.metering.chains import chain_of

from coordinator.config import Settings
from hypergpu.chain.sent.acts import ActFile
from hypergpu.cli.deployment.record import RecordFile
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address

OWNER = Address("0x" + "12" * 20)
NO_TEXT = b'[{"owner": "\xff", "what": "\xff", "coordinator": "\xff"}]'


@pytest.mark.parametrize("kind", [ActFile, RecordFile])
def test_what_was_signed_and_is_no_text_is_refused_by_its_name(
    tmp_path: Path, kind: type[ActFile | RecordFile]
) -> None:
    file = kind(tmp_path, 31337)
    file.path.parent.mkdir(parents=True)
    file.path.write_bytes(NO_TEXT)
    with pytest.raises(HyperGPUError, match="utf-8") as refused:
        file.of(OWNER) if isinstance(file, ActFile) else file.newest(OWNER)
    assert refused.value.reason is Reason.FILE_UNUSABLE
    assert str(file.path) in refused.value.detail


def test_a_chain_that_is_away_is_said_to_be_whatever_is_remembered_of_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    (tmp_path / "known.json").write_bytes(b'{"url": "\xff", "chain_id": 1}')
    with pytest.raises(HyperGPUError) as refused:
        chain_of(Settings(data_dir=tmp_path, chain=url), tmp_path, {1}.__contains__)
    assert refused.value.reason is Reason.CHAIN_UNREACHABLE
