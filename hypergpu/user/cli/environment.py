"""`env` and `config show`: versions, machine and settings, with secrets redacted."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping

import msgspec
import psutil

from hypergpu.privacy import holds_secret
from hypergpu.user.client.settings import config_file, known_settings, resolve_settings
from hypergpu.user.terminal.output import size
from hypergpu.workloads.registry import complaints, entries

PACKAGES = (
    "hypergpu",
    "torch",
    "torchvision",
    "numpy",
    "grpcio",
    "protobuf",
    "msgspec",
    "blake3",
    "SQLAlchemy",
    "cryptography",
)
_TOKEN = re.compile(r"hgpu1\.[A-Za-z0-9_\-]+")
_LOGIN = re.compile(r"://[^/@\s]+@")
_PATH = re.compile(r"(https?://[^/?#\s]+[/?#])\S+")
"""Providers of chains put their keys there."""
REDACTED = "<redacted>"


class Environment(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/env/1"):
    """`env`."""

    python: str
    system: str
    processors: int
    memory_bytes: int
    packages: dict[str, str]
    settings: dict[str, str]
    variables: dict[str, str]
    workloads: dict[str, str]
    complaints: list[str]


def environment() -> Environment:
    """Everything a maintainer asks for first, without a secret in it."""
    return Environment(
        python=platform.python_version(),
        system=platform.platform(),
        processors=os.cpu_count() or 0,
        memory_bytes=psutil.virtual_memory().total,
        packages={name: _version(name) for name in PACKAGES},
        settings={
            each.name: f"{each.value} ({each.origin})" for each in effective_settings().settings
        },
        variables=redacted_variables(os.environ),
        workloads={entry.name: f"{entry.kind}: {entry.meaning}" for entry in entries()},
        complaints=[redact(text) for text in complaints()],
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def redacted_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that bear on us, without secrets."""
    name_pattern = re.compile(
        r"HYPERGPU_.*|(https?|all|no|grpc)_proxy|NO_COLOR|CUDA_VISIBLE_DEVICES", re.IGNORECASE
    )
    return {
        name: REDACTED if holds_secret(name) else redact(value)
        for name, value in sorted(variables.items())
        if name_pattern.fullmatch(name)
    }


def redact(text: str) -> str:
    """The text without tokens, logins and what stands behind the hosts of web addresses."""
    bare = _LOGIN.sub(f"://{REDACTED}@", _TOKEN.sub(REDACTED, text))
    return _PATH.sub(rf"\1{REDACTED}", bare)


def environment_lines(found: Environment) -> list[str]:
    """The block to paste."""
    lines = [
        "```",
        f"python      {found.python}",
        f"system      {found.system}",
        f"processors  {found.processors}, memory {size(found.memory_bytes)}",
    ]
    for title, rows in (
        ("packages", found.packages),
        ("settings", found.settings),
        ("variables", found.variables),
        ("workloads", found.workloads),
    ):
        width = max((len(name) for name in rows), default=0)
        lines += [f"{title}:", *[f"  {name:<{width}}  {value}" for name, value in rows.items()]]
    lines += [f"complaint: {text}" for text in found.complaints]
    return [*lines, "```"]


class SettingView(msgspec.Struct, frozen=True):
    """One setting."""

    name: str
    value: str
    origin: str
    """``flag``, ``env``, ``file``, ``up`` or ``default``."""


class EffectiveSettings(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/config/1"):
    """`config show`."""

    file: str
    settings: list[SettingView]


def effective_settings() -> EffectiveSettings:
    """Every setting with its origin.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the settings file is damaged.
    """
    definitions = known_settings()
    views = [
        SettingView(
            name,
            REDACTED if definitions[name].is_secret and setting.value else redact(setting.value),
            setting.origin,
        )
        for name, setting in resolve_settings().items()
    ]
    return EffectiveSettings(str(config_file()), views)
