"""The command line's own settings and where each came from: flag, environment, file, `up`, default.

`up` is the profile that `hypergpu up` leaves behind, so that its machine needs nothing more.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hypergpu.errors import HyperGPUError, Reason


class KnownSetting(NamedTuple):
    """A setting that exists."""

    environment: str
    default: str
    meaning: str
    is_secret: bool = False


class ResolvedSetting(NamedTuple):
    """A setting's value and what decided it."""

    value: str
    origin: str


def _home(variable: str, fallback: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / fallback) / "hypergpu"


def config_folder() -> Path:
    """Where the settings file and the profile of `up` lie."""
    return _home("XDG_CONFIG_HOME", ".config")


def cache_folder() -> Path:
    """Where fetched CAs are kept; losing it costs one handshake."""
    return _home("XDG_CACHE_HOME", ".cache")


def comparisons_folder() -> Path:
    """Where `hypergpu compare` leaves a copy of each result, for the page."""
    return _home("XDG_DATA_HOME", ".local/share") / "comparisons"


def config_file() -> Path:
    """The settings file a person writes."""
    path_text = os.environ.get("HYPERGPU_CONFIG")
    return Path(path_text) if path_text else config_folder() / "config.toml"


def profile_file() -> Path:
    """What `hypergpu up` writes on its machine."""
    return config_folder() / "up.toml"


def known_settings() -> Mapping[str, KnownSetting]:
    """Every setting there is."""
    data_home = _home("XDG_DATA_HOME", ".local/share")
    return {
        "address": KnownSetting("HYPERGPU_ADDRESS", "", "host:port; else the token's addresses"),
        "token": KnownSetting("HYPERGPU_TOKEN", "", "a user's or operator's token", is_secret=True),
        "token_file": KnownSetting("HYPERGPU_TOKEN_FILE", "", "the file that holds the token"),
        "timeout_s": KnownSetting("HYPERGPU_TIMEOUT_S", "60", "deadline of one call"),
        "data_dir": KnownSetting(
            "HYPERGPU_DATA_DIR",
            str(data_home / "coordinator"),
            "what `up` keeps, journal and blobs",
        ),
        "state_dir": KnownSetting(
            "HYPERGPU_STATE_DIR",
            str(data_home / "node"),
            "what `join` keeps: key and optimizer state",
        ),
        "via": KnownSetting(
            "HYPERGPU_VIA", "", "user@host[:port] whose ports `up` leads here by ssh"
        ),
        "chain": KnownSetting(
            "HYPERGPU_CHAIN",
            "none",
            "what `up` settles paid jobs on: a chain, its RPC's address or a profile's file;"
            " `anvil` starts one here",
        ),
        "chain_url": KnownSetting(
            "HYPERGPU_COORDINATOR_CHAIN_URL", "", "the RPC of that chain; else its own"
        ),
    }


def resolve_settings(
    flags: Mapping[str, str | None] | None = None, profile: Path | None = None
) -> dict[str, ResolvedSetting]:
    """Every setting with its origin.

    Args:
        flags: Values that count before all others.
        profile: A settings file to read instead of the user's.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the settings file is damaged or has an unknown key.
    """
    definitions = known_settings()
    layers: list[tuple[str, Mapping[str, str]]] = [
        ("flag", {name: value for name, value in (flags or {}).items() if value}),
        ("env", _environment(definitions)),
        ("file", _file(profile or config_file(), definitions)),
        ("up", _file(profile_file(), definitions)),
    ]
    settings = {name: _first(name, layers, definitions[name].default) for name in definitions}
    # The address in up's profile belongs to up's token: another token names its own addresses.
    if settings["address"].origin == "up" and _token_origin(settings) != "up":
        settings["address"] = ResolvedSetting("", "default")
    return settings


def _first(name: str, layers: list[tuple[str, Mapping[str, str]]], default: str) -> ResolvedSetting:
    for origin, values in layers:
        if name in values:
            return ResolvedSetting(values[name], origin)
    return ResolvedSetting(default, "default")


def _token_origin(found: Mapping[str, ResolvedSetting]) -> str:
    return token_setting(found)[1].origin


def token_setting(found: Mapping[str, ResolvedSetting]) -> tuple[str, ResolvedSetting]:
    """Which of ``token`` and ``token_file`` counts, by the stronger origin; the token on a tie."""
    return _stronger(found, "token", "token_file")


def chain_meant(found: Mapping[str, ResolvedSetting]) -> tuple[str, str]:
    """The chain, and the address of its RPC; empty: the chain's own.

    An address may name a chain, and its RPC too: that of the stronger origin counts, or the RPC's.
    """
    chain, rpc = found["chain"].value, found["chain_url"].value
    is_address = "://" in chain
    name, _ = _stronger(found, "chain_url", "chain")
    return chain, "" if is_address and name == "chain" else rpc


def _stronger(found: Mapping[str, ResolvedSetting], *names: str) -> tuple[str, ResolvedSetting]:
    """The one that was decided by the stronger origin; the first on a tie."""
    strength = ("flag", "env", "file", "up", "default")
    candidates = ((name, found[name]) for name in names)
    return min(candidates, key=lambda each: strength.index(each[1].origin))


def _environment(known: Mapping[str, KnownSetting]) -> dict[str, str]:
    values = {name: os.environ.get(setting.environment, "") for name, setting in known.items()}
    return {name: value for name, value in values.items() if value}


def _file(path: Path, known: Mapping[str, KnownSetting]) -> dict[str, str]:
    try:
        tree = tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"settings file {path}: {error}") from error
    for name in tree:
        if name not in known:
            detail = f"settings file {path}: no setting {name!r}; known: {', '.join(known)}"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail)
    return {name: str(value) for name, value in tree.items()}


def profile() -> dict[str, str]:
    """What `up` left on this machine; empty when nothing is there that can be read."""
    try:
        return _file(profile_file(), known_settings())
    except HyperGPUError:
        return {}


def write_profile(values: Mapping[str, str], folder: Path | None = None) -> Path:
    """Replace the profile of `up`; returns where it lies."""
    path = (folder or config_folder()) / profile_file().name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["# Written by `hypergpu up`; your own settings belong in config.toml."]
    # A JSON string is a TOML basic string.
    lines += [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    fresh = path.with_suffix(".tmp")
    fresh.write_text("\n".join(lines) + "\n", "utf-8")
    fresh.replace(path)
    return path


def timeout_s(found: Mapping[str, ResolvedSetting]) -> float:
    """The deadline of one unary call.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, it is no positive number.
    """
    setting = found["timeout_s"]
    try:
        seconds = float(setting.value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86_400:
        detail = f"timeout_s is {setting.value!r} (from {setting.origin}), not a number of seconds"
        definition = known_settings()["timeout_s"]
        fix = f"give seconds, for example {definition.environment}={definition.default}"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    return seconds
