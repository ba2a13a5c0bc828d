"""The folder of a demo or a run: emptied of its own, held alone, never anybody else's."""

from pathlib import Path

import pytest

from hypergpu.cluster.folder import RunFolder, require_own, run_folder
from hypergpu.errors import HyperGPUError


def of(path: Path) -> RunFolder:
    return RunFolder(path, ".mark", ("state", "summary.json"))


def test_what_an_earlier_run_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = of(tmp_path / "new" / "out")
    with run_folder(folder):
        (folder.path / "state").mkdir()
        for name in ("state/journal", "summary.json", "mine"):
            (folder.path / name).touch()
    with run_folder(folder):
        assert {each.name for each in folder.path.iterdir()} == {".mark", "mine"}


def test_a_folder_with_such_names_and_no_mark_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with pytest.raises(HyperGPUError, match="is not of a run"), run_folder(of(tmp_path)):
        pass
    with pytest.raises(HyperGPUError, match="is not of a run"):
        require_own(of(tmp_path))
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_a_folder_in_which_a_run_goes_on_is_refused_and_kept(tmp_path: Path) -> None:
    folder = of(tmp_path)
    with run_folder(folder):
        (tmp_path / "state").mkdir()
        with pytest.raises(HyperGPUError, match="a run is going on in"), run_folder(folder):
            pass
        with pytest.raises(HyperGPUError, match="a run is going on in"):
            require_own(folder)
        assert (tmp_path / "state").exists()
    require_own(folder)
    assert (tmp_path / "state").exists()
