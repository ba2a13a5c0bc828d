"""The folder of a base as the files that a farm job sends."""

from pathlib import Path

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.base_files import WEIGHTS_SUFFIX, is_base_file
from hypergpu.user.farm.folder_parts import FolderNames, FolderParts, folder_files, folder_parts


def base_parts(folder: Path) -> FolderParts:
    """Read a base's folder; weights are not read.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it holds no base, or one in too many files.
    """
    title = f"the base {folder}"
    try:
        files = folder_files(folder, is_base_file)
    except OSError as error:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{title}: {error.strerror}") from error
    if not any(name.endswith(WEIGHTS_SUFFIX) for name in files):
        detail = f"{title} holds no *{WEIGHTS_SUFFIX}"
        fix = "save it with save_pretrained(folder), which writes them"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix)
    fix = "save it in fewer: save_pretrained(folder, max_shard_size='50GB')"
    return folder_parts(files, FolderNames(title, "weights", fix))
