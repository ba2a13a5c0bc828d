"""A chain that its operator describes: a TOML file with the fields of `ChainProfile`."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from hypergpu.chain.profiles import ChainProfile
from hypergpu.errors import HyperGPUError, Reason

SUFFIX = ".toml"
_MANUAL = "see docs/chains.md for a whole one"
_BYTES_MAX = 100_000


def described_profile(path: Path) -> ChainProfile:
    """Read a profile.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be read, or something in it is wrong or missing.
    """
    try:
        with path.open("rb") as file:
            tree = tomllib.loads(file.read(_BYTES_MAX).decode("utf-8"))
    except OSError as broken:
        raise _unusable(path, f"it cannot be read: {broken.strerror}") from None
    except UnicodeDecodeError:
        raise _unusable(path, "it is no text") from None
    except tomllib.TOMLDecodeError as broken:
        raise _unusable(path, f"it is no TOML: {broken}") from None
    if wrong := _misnamed(tree):
        raise _unusable(path, wrong)
    try:
        profile = msgspec.convert(tree, ChainProfile)
    except msgspec.ValidationError as broken:
        words, _, place = str(broken).partition(" - at ")
        field = place.strip("`").removeprefix("$.")
        raise _unusable(path, f"{field}: {words[:1].lower()}{words[1:]}") from None
    if profile.tip_wei > profile.max_fee_cap_wei:
        least, most = profile.tip_wei, profile.max_fee_cap_wei
        raise _unusable(path, f"tip_wei: {least} is more than max_fee_cap_wei, {most}")
    return profile


def _misnamed(tree: dict[str, Any]) -> str:
    """Which fields there are that should not be, and which are not that should."""
    fields = msgspec.structs.fields(ChainProfile)
    unknown = sorted(tree.keys() - {field.name for field in fields})
    missing = [each.name for each in fields if each.required and each.name not in tree]
    told = [f"it has no use for {', '.join(unknown)}"] if unknown else []
    told += [f"it lacks {', '.join(missing)}"] if missing else []
    return "; ".join(told)


def _unusable(path: Path, why: str) -> HyperGPUError:
    return HyperGPUError(Reason.FILE_UNUSABLE, f"the chain profile {path}: {why}", fix=_MANUAL)
