"""Job files of farm jobs: TOML with ``kind = "map"``."""

import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.farm.request import MapSettings
from hypergpu.user.farm.starting import MapOrder

_FILE_BYTES_MOST = 1 << 20
_FIX = 'write kind = "map", data, out and a table [map] with item_kind: docs/farm.md'


class MapFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job file of a farm job."""

    kind: Literal["map"]
    data: str
    """Path of the data, from the file's folder."""
    out: str
    """Path of the output, from the file's folder."""
    map: MapSettings


def read_map_file(path: Path) -> MapOrder | None:
    """The farm job that a file describes; None: its kind is another.

    Raises:
        HyperGPUError: SPEC_INVALID, it describes none that can be; FILE_UNUSABLE.
    """
    table = read_tables(path)
    if table.get("kind") != "map":
        return None
    try:
        file = msgspec.convert(table, MapFile, strict=True)
    except msgspec.ValidationError as error:
        raise HyperGPUError(Reason.SPEC_INVALID, f"{path}: {error}", fix=_FIX) from error
    settings = file.map
    if (base := path.parent / settings.base).is_dir() and settings.base:
        settings = msgspec.structs.replace(settings, base=str(base))
    settings.check()
    return MapOrder(settings, path.parent / file.data, path.parent / file.out)


def read_tables(path: Path) -> dict[str, object]:
    """A job file's tables; none where it is no TOML, which the reader of training jobs explains.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be read.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES_MOST + 1)
    except OSError as error:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path}: {error.strerror}") from error
    try:
        return tomllib.loads(content[:_FILE_BYTES_MOST].decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError):
        return {}
