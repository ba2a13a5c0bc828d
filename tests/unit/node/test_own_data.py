"""Folders of data that stay on a node: what the owner names, and what may be in them."""

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpu_node.shell.owner.limits_file import load_limits
from gpu_node.shell.owner.own_data import check_places, checked_folder
from hypergpu.errors import HyperGPUError, Reason


@pytest.fixture
def wards(tmp_path: Path) -> Path:
    """A folder with two files, one of them in a sub-folder, that nobody else can change."""
    folder = tmp_path / "srv" / "wards"
    (folder / "five").mkdir(parents=True)
    for path in (folder / "smith.txt", folder / "five" / "jones.txt"):
        path.write_text("healthy")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def limits_of(folder: Path, table: str) -> dict[str, str]:
    (folder / "node.toml").write_text(f"threads = 1\n[data]\n{table}\n")
    return load_limits(folder, ()).data


def test_an_owner_names_a_folder_for_each_data_set(tmp_path: Path, wards: Path) -> None:
    node = tmp_path / "node"
    node.mkdir()
    assert limits_of(node, f'wards = "{wards}"') == {"wards": str(wards)}
    assert checked_folder({"wards": str(wards)}, "wards") == wards


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('wards = "srv/wards"', "data is .*; it must be a table of names and whole paths"),
        ('"Wards 5" = "/srv"', "it must be a table of names and whole paths"),
        ("wards = 5", "it must be a table of names and whole paths"),
        ('wards = "/no/such/folder"', "data.wards is /no/such/folder, and there is no such folder"),
        ('wards = "HERE"', "data.wards is .*, which holds the node's own folder or lies in it"),
        ('wards = "HERE/inner"', "which holds the node's own folder or lies in it"),
    ],
)
def test_a_wrong_folder_stops_the_node_at_its_start(tmp_path: Path, table: str, said: str) -> None:
    (tmp_path / "inner").mkdir()
    with pytest.raises(HyperGPUError, match=said) as wrong:
        limits_of(tmp_path, table.replace("HERE", str(tmp_path)))
    assert wrong.value.reason is Reason.ARGUMENT_INVALID


def refusal(folder: Path) -> str:
    """Why a folder is not read; the log alone says where."""
    with capture_logs() as logs, pytest.raises(HyperGPUError) as failure:
        checked_folder({"wards": str(folder)}, "wards")
    assert failure.value.reason is Reason.OWNER_DATA
    text = str(failure.value)
    assert not [word for word in ("srv", "smith", "jones", "five", "elsewhere") if word in text]
    assert logs[-1]["such_as"].startswith(str(folder))
    return failure.value.detail


def test_a_folder_that_others_change_or_a_link_leaves_is_refused_without_its_paths(
    wards: Path, tmp_path: Path
) -> None:
    (wards / "again.txt").symlink_to(wards / "smith.txt")
    assert checked_folder({"wards": str(wards)}, "wards") == wards
    inner = wards / "five" / "jones.txt"
    for path, mode in ((inner, 0o666), (wards / "five", 0o775), (wards, 0o757)):
        before = path.stat().st_mode
        path.chmod(mode)
        assert refusal(wards).startswith("data set wards: other users can change it: chmod -R go-w")
        path.chmod(before)
    (tmp_path / "elsewhere").mkdir()
    (wards / "five" / "link").symlink_to(tmp_path / "elsewhere")
    (wards / "passwords").symlink_to("/etc/passwd")
    (wards / "circle").symlink_to(wards / "circle")
    assert refusal(wards) == "data set wards: links lead out of it: remove them (3 places)"
    (wards / "circle").unlink()
    (wards / "five" / "link").unlink()
    (wards / "passwords").unlink()
    os.mkfifo(wards / "pipe", 0o600)
    assert (
        refusal(wards) == "data set wards: it holds what is neither file nor folder: remove it"
        " (1 place)"
    )


def test_what_others_own_or_can_replace_is_refused(wards: Path) -> None:
    wards.parent.chmod(0o777)
    with pytest.raises(HyperGPUError, match="other users can change a folder around it: chmod"):
        checked_folder({"wards": str(wards)}, "wards")
    wards.parent.chmod(0o1777)
    assert checked_folder({"wards": str(wards)}, "wards") == wards
    if os.geteuid() == 0:  # nobody else can give a folder away
        os.chown(wards / "five", 4321, -1)
        assert refusal(wards).startswith("data set wards: other users own it: chown -R")
    (wards / "circle").symlink_to(wards / "circle")
    with pytest.raises(HyperGPUError, match="and there is no such folder"):
        check_places({"wards": str(wards / "circle")}, wards.parent / "node")


def test_a_data_set_without_a_folder_is_refused_by_its_name(wards: Path) -> None:
    with pytest.raises(HyperGPUError, match="named no folder for the data set chest-xrays"):
        checked_folder({"wards": str(wards)}, "chest-xrays")
