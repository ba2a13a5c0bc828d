"""`config show`: the settings as they are in effect, secrets redacted."""

import msgspec

from hypergpu.cli.machine.environment import REDACTED, redacted
from hypergpu.client.settings import config_file, known_settings, resolved


class SettingView(msgspec.Struct, frozen=True):
    """One setting."""

    name: str
    value: str
    origin: str
    """``flag``, ``env``, ``file``, ``up`` or ``default``."""


class Settings(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/config/1"):
    """`config show`."""

    file: str
    settings: list[SettingView]


def effective_settings() -> Settings:
    """Every setting with its origin.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the settings file is damaged.
    """
    known = known_settings()
    views = [
        SettingView(
            name,
            REDACTED if known[name].is_secret and found.value else redacted(found.value),
            found.origin,
        )
        for name, found in resolved().items()
    ]
    return Settings(str(config_file()), views)
