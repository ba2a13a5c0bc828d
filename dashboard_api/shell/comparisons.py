"""Results that `hypergpu compare` left in a folder."""

from pathlib import Path
from typing import Any

import msgspec

FILES_MOST = 50
FILE_BYTES_MAX = 4 << 20


def read_comparisons(folder: Path) -> list[dict[str, Any]]:
    """Every result, newest first, with the file's name and time; files that hold none are left out.

    Args:
        folder: Where `hypergpu compare --out` wrote; its subfolders count.
    """
    if not folder.is_dir():
        return []
    paths = [path for path in (*folder.glob("*.json"), *folder.glob("*/*.json")) if path.is_file()]
    paths.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    comparisons = []
    for path in paths[:FILES_MOST]:
        if (result := _read(path)) is not None:
            at_ms = path.stat().st_mtime_ns // 1_000_000
            comparisons.append({"name": path.stem, "at_ms": at_ms, "result": result})
    return comparisons


def _read(path: Path) -> dict[str, Any] | None:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            return None
        result = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return None
    return result if str(result.get("schema", "")).startswith("hypergpu/compar") else None
