"""Uploads go on where they were; archives unpack within bounds or not at all."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from dashboard_api.shell.failures import RequestRefusedError
from dashboard_api.shell.uploads import Uploads, unpack

LIMIT = 1_000_000


def make_zip(path: Path, entries: dict[str, bytes], *, mode: int = 0) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return path


def make_tar(path: Path, member: tarfile.TarInfo, content: bytes = b"") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return path


async def test_an_interrupted_upload_goes_on_where_it_was(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path, LIMIT)
    upload = uploads.begin("me", "set.npz", 10)
    upload = await uploads.append(upload, 0, b"01234")
    # The answer was lost, and the piece comes again.
    upload = await uploads.append(upload, 0, b"01234")
    again = Uploads(tmp_path, LIMIT).find(upload.id, "me")
    assert again.committed_bytes == 5
    upload = await uploads.append(again, 3, b"3456789")
    assert (uploads.data_folder(upload) / "set.npz").read_bytes() == b"0123456789"


async def test_a_piece_with_a_gap_or_too_much_is_refused(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path, LIMIT)
    upload = uploads.begin("me", "set.npz", 4)
    with pytest.raises(RequestRefusedError, match="begins at 2"):
        await uploads.append(upload, 2, b"23")
    with pytest.raises(RequestRefusedError, match="more than the 4 bytes"):
        await uploads.append(upload, 0, b"01234")
    with pytest.raises(RequestRefusedError, match="0 of 4 bytes"):
        uploads.data_folder(upload)


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "x" * 200, "a\x00b"])
def test_a_name_that_is_no_file_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(RequestRefusedError):
        Uploads(tmp_path, LIMIT).begin("me", name, 1)


@pytest.mark.parametrize("size", [0, -1, LIMIT + 1])
def test_a_size_outside_of_the_limits_is_refused(size: int, tmp_path: Path) -> None:
    with pytest.raises(RequestRefusedError, match="are not from 1"):
        Uploads(tmp_path, LIMIT).begin("me", "set.npz", size)


def test_an_upload_of_somebody_else_is_not_there(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path, LIMIT)
    upload = uploads.begin("me", "set.npz", 4)
    for upload_id in (upload.id, "0" * 32, "../" + upload.id):
        with pytest.raises(RequestRefusedError, match="there is no upload"):
            uploads.find(upload_id, "you")


def test_an_archive_of_plain_files_is_unpacked(tmp_path: Path) -> None:
    source = make_zip(tmp_path / "a.zip", {"train/0.png": b"a", "train/1.png": b"b"})
    out = tmp_path / "out"
    out.mkdir()
    unpack(source, "a.zip", out, LIMIT)
    assert (out / "train" / "1.png").read_bytes() == b"b"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../b", "..\\b", "C:\\x", "a\\..\\..\\b"])
def test_names_that_lead_out_of_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    out.mkdir(parents=True)
    with pytest.raises(RequestRefusedError, match="leads out"):
        unpack(make_zip(tmp_path / "a.zip", {name: b"x"}), "a.zip", out, LIMIT)
    assert list(out.iterdir()) == []


def test_links_and_devices_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    linked_zip = make_zip(tmp_path / "a.zip", {"link": b"/etc/passwd"}, mode=0o120777)
    with pytest.raises(RequestRefusedError, match="no regular file"):
        unpack(linked_zip, "a.zip", out, LIMIT)
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
        member = tarfile.TarInfo("thing")
        member.type, member.linkname = kind, "/etc/passwd"
        with pytest.raises(RequestRefusedError, match="no regular file"):
            unpack(make_tar(tmp_path / "a.tar.gz", member), "a.tar.gz", out, LIMIT)


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    bomb = make_zip(tmp_path / "a.zip", {"zeros": bytes(2 * LIMIT)})
    assert bomb.stat().st_size < LIMIT / 100
    with pytest.raises(RequestRefusedError, match="unpacks to too much"):
        unpack(bomb, "a.zip", out, LIMIT)


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tgz"])
def test_a_damaged_archive_is_refused(name: str, tmp_path: Path) -> None:
    source = tmp_path / name
    source.write_bytes(b"nothing of the kind" * 50)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(RequestRefusedError, match="cannot be read"):
        unpack(source, name, out, LIMIT)
