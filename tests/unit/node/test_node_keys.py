"""The node's identity: which passphrase its key is encrypted under, and where that lies."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpu_node.__main__ import app
from gpu_node.shell.state.keys import identity_key
from gpu_node.shell.state.paths import StatePaths
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.keys.keyfile import place_beside
from hypergpu.keys.passphrase import Passphrase, passphrase_of_file

GIVEN = Passphrase(b"given", "the test", is_made=True)


def folder(tmp_path: Path) -> StatePaths:
    with StatePaths(tmp_path / "node") as paths:
        return paths


def test_an_unattended_node_makes_a_passphrase_beside_its_folder(tmp_path: Path) -> None:
    paths = folder(tmp_path)
    key = identity_key(paths)
    assert identity_key(paths).secret == key.secret
    assert place_beside(paths.root) == tmp_path / "node.passphrase"
    assert place_beside(paths.root).stat().st_mode & 0o777 == 0o600
    assert key.secret.hex() not in paths.identity.read_text()


def test_a_copy_of_the_folder_alone_opens_nothing(tmp_path: Path) -> None:
    paths = folder(tmp_path)
    identity_key(paths)
    stolen = StatePaths(paths.root.rename(tmp_path / "copy"))
    with pytest.raises(HyperGPUError, match=r"copy\.passphrase cannot be read: No such file"):
        identity_key(stolen)
    assert not place_beside(stolen.root).exists()


def test_a_given_passphrase_is_kept_nowhere(tmp_path: Path) -> None:
    paths = folder(tmp_path)
    key = identity_key(paths, GIVEN)
    assert identity_key(paths, GIVEN).secret == key.secret
    assert not place_beside(paths.root).exists()
    with pytest.raises(HyperGPUError, match="cannot be read"):
        identity_key(paths)


def test_a_volume_of_its_own_is_given_a_passphrase_by_hand() -> None:
    with pytest.raises(HyperGPUError, match="is a volume of its own") as refused:
        identity_key(StatePaths(Path("/proc")))
    assert "--passphrase-file" in refused.value.fix


def test_a_key_that_belongs_to_a_lost_passphrase_is_not_written_over(tmp_path: Path) -> None:
    paths = folder(tmp_path)
    identity_key(paths)
    before = paths.identity.read_bytes()
    place_beside(paths.root).write_text("another\n")
    with pytest.raises(HyperGPUError, match=r"from .*node\.passphrase does not open"):
        identity_key(paths)
    assert paths.identity.read_bytes() == before


def test_the_passphrase_is_changed_by_a_command(tmp_path: Path) -> None:
    paths = folder(tmp_path)
    key = identity_key(paths)
    words = tmp_path / "words"
    words.write_text("correct horse battery staple\n")
    words.chmod(0o600)
    asked = ["passphrase", "--new", str(words), "--state-dir", str(paths.root)]
    changed = CliRunner().invoke(app, asked)
    assert changed.exit_code == 0, changed.output
    assert identity_key(paths, passphrase_of_file(words)).secret == key.secret
    again = CliRunner().invoke(app, [*asked, "--passphrase-file", str(words)])
    assert again.exit_code == 0, again.output
    rejected = CliRunner().invoke(app, asked).exception
    assert isinstance(rejected, HyperGPUError)
    assert rejected.reason is Reason.FILE_UNUSABLE
