"""Which files of a model travel with a farm job. No file whose format may hold code is taken:
neither pickles nor modules of Python.
"""

from pathlib import PurePosixPath

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.folder_index import FolderIndex, read_folder_index

BASE_INDEX = "base"
"""Name of the index among a request's files."""
WEIGHTS_SUFFIX = ".safetensors"
SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", WEIGHTS_SUFFIX})
"""Endings of the files of a base that travel; others, such as other formats of weights, do not."""


def read_base_index(content: bytes) -> FolderIndex:
    """Read the index of a base, trusting nothing in it.

    Raises:
        HyperGPUError: MANIFEST_INVALID, it is too large or malformed, or names a file that may not
            be part of a base.
    """
    index = read_folder_index(content)
    for path in index.paths:
        if not is_base_file(path):
            detail = f"{path} is no file of a base: these end in {', '.join(sorted(SUFFIXES))}"
            raise HyperGPUError(Reason.MANIFEST_INVALID, detail, fix="leave it out")
    return index


def is_base_file(path: str) -> bool:
    """Whether a file may be part of a base, by its name."""
    return PurePosixPath(path).suffix.lower() in SUFFIXES
