"""Folders of files as items: texts, or pictures where the kind takes them."""

import base64
from pathlib import Path
from typing import Any, NamedTuple

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.farm.item_rules import ItemForm
from hypergpu.workloads.finetuning.row_files import TEXT

PICTURES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
PICTURE_BYTES_MOST = 3 << 20
"""Size of a picture's file: in base64 it has to fit into a chunk."""


_ARRAYS = frozenset({".npz", ".parquet"})


def is_picture_folder(given: Any) -> bool:
    """Whether data are a folder with pictures, and without files of arrays."""
    if not isinstance(given, str | Path) or not (folder := Path(given).expanduser()).is_dir():
        return False
    endings = {path.suffix.lower() for path in folder.rglob("*")}
    return bool(endings & PICTURES) and not endings & _ARRAYS


class PictureFile(NamedTuple):
    """The content of a picture's file, not decoded: whoever does the item decodes it."""

    content: bytes


def folder_items(folder: Path, form: ItemForm) -> tuple[dict[str, Path], bool]:
    """Files of a folder that are items, by their paths within it, and whether they are pictures.

    Raises:
        HyperGPUError: FILE_UNUSABLE, there are none, or both texts and pictures.
    """
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name[:1] != "."]
    texts = {_name(path, folder): path for path in paths if path.suffix.lower() in TEXT}
    pictures = {_name(path, folder): path for path in paths if path.suffix.lower() in PICTURES}
    if form is not ItemForm.TEXT_OR_PICTURE:
        pictures = {}
    if texts and pictures:
        detail = f"the folder {folder} holds {len(texts)} texts and {len(pictures)} pictures"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix="give a folder of one of both")
    if not texts and not pictures:
        takes_pictures = form is ItemForm.TEXT_OR_PICTURE
        endings = ", ".join(sorted(TEXT | PICTURES if takes_pictures else TEXT))
        detail = f"the folder {folder} holds no text file{' and no picture' * takes_pictures}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=f"add files ending in {endings}")
    return (pictures, True) if pictures else (texts, False)


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def picture_value(picture: PictureFile) -> tuple[Any, str]:
    """A picture as the value of an item, or why it is none."""
    if len(picture.content) > PICTURE_BYTES_MOST:
        return None, f"the picture has {len(picture.content)} bytes, {PICTURE_BYTES_MOST} at most"
    return {"image": base64.b64encode(picture.content).decode()}, ""
