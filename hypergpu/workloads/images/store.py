"""Where downloaded datasets lie, safe against several processes filling it at once."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError

from hypergpu.workloads.workload import DatasetError


def datasets_folder() -> Path:
    """``HYPERGPU_DATASETS``, or a folder in the user's cache."""
    named = os.environ.get("HYPERGPU_DATASETS")
    return Path(named) if named else Path.home() / ".cache" / "hypergpu" / "datasets"


def stored_dataset(root: Path, name: str, download: Callable[[Path], None]) -> Path:
    """The folder ``root/name``, downloaded when it is not there.

    The download goes to a folder of its own and is renamed into place when it is complete, so that
    a broken one leaves nothing behind and of two at once the first wins.

    Raises:
        DatasetError: The download failed.
    """
    final = root / name
    if final.is_dir():
        return final
    root.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        download(partial)
        if not final.is_dir():
            _rename_unless_there(partial, final)
    except (URLError, RuntimeError, OSError) as error:
        raise DatasetError(
            f"the {name} dataset could not be downloaded: {error}."
            f" Fix: connect to the internet, or copy it from another machine to {final}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def _rename_unless_there(partial: Path, final: Path) -> None:
    try:
        partial.rename(final)
    except OSError:
        if not final.is_dir():
            raise
