"""Which coordinator a dashboard shows, and as whom."""

from pathlib import Path

from dashboard_api.config import DashboardSettings
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, TokenId
from hypergpu.user.client import ConnectionTarget
from hypergpu.user.client.connection import find_target
from hypergpu.wire.credentials import Role, Token, parse_token

CALL_TIMEOUT_S = 30.0
NOBODY = ConnectionTarget("recording", Token((), Digest(""), Role.USER, TokenId(""), ""), 1.0)
"""Stands in for a coordinator where a recording is shown: nobody is called."""


def dashboard_target(settings: DashboardSettings) -> ConnectionTarget:
    """The coordinator of the settings, with the token's file or the user's own settings.

    A coordinator that is away at the start is waited for: only an address is needed.

    Raises:
        HyperGPUError: None is named, or the file holds no token.
    """
    if settings.recording is not None:
        return NOBODY
    if settings.coordinator and settings.token_file:
        try:
            text = Path(settings.token_file).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            detail = f"the token file {settings.token_file}: {error}"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error
        return ConnectionTarget(settings.coordinator, parse_token(text), CALL_TIMEOUT_S)
    return find_target({"address": settings.coordinator, "token_file": settings.token_file})
