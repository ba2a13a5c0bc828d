"""`python -m coordinator`, also installed as `hypergpu-coordinator`."""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from coordinator.config import Settings
from coordinator.shell.failpoints import NAMES, VARIABLE, arm
from hypergpu.errors import HyperGPUError
from hypergpu.privacy import make_files_private
from hypergpu.process import (
    collect_seldom,
    configure_logs,
    keep_bulk_memory,
    raise_descriptor_limit,
)
from hypergpu.protocol import version_text
from hypergpu.stdio import prepare_streams

if TYPE_CHECKING:
    from coordinator.shell.driver.kinds import KindTable


def _usual_kinds() -> "KindTable":
    from coordinator.shell.kinds.table import KINDS

    return KINDS


def main(
    arguments: list[str] | None = None, *, load_kinds: "Callable[[], KindTable]" = _usual_kinds
) -> int:
    """Run one coordinator until it is told to end; returns the exit status.

    Args:
        arguments: Its flags; None: those of this process.
        load_kinds: Imports the kinds of work that it drives, once its process is set up.
    """
    # Errors of gRPC are reported once, by this process, with the fix.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    flags = vars(_parser().parse_args(arguments))
    if flags.pop("list_failpoints"):
        for name, meaning in NAMES.items():
            sys.stdout.write(f"{name}\t{meaning}\n")
        return 0
    flags = {name: value for name, value in flags.items() if value is not None}
    return _run(flags, load_kinds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hypergpu-coordinator",
        description="The process that decides. `hypergpu up` starts it with friendlier output.",
        epilog="Every flag is also read from HYPERGPU_COORDINATOR_* in the environment.",
    )
    actions: dict[Any, str] = {bool: "store_true", tuple[str, ...]: "append"}
    for name, field in Settings.model_fields.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            action=actions.get(field.annotation, "store"),
            default=None,
            help=f"{field.description} (default: {field.default or 'none'})",
        )
    parser.add_argument("--version", action="version", version=version_text("hypergpu-coordinator"))
    parser.add_argument("--list-failpoints", action="store_true", help="names for tests, then exit")
    return parser


def _run(flags: dict[str, Any], load_kinds: "Callable[[], KindTable]") -> int:
    from coordinator.shell.app.start_errors import start_error
    from coordinator.shell.app.takeover import end_turn, is_away
    from coordinator.shell.rate import LineLimiter

    settings = None
    try:
        prepare_streams()
        arm(os.environ.get(VARIABLE, ""))
        settings = Settings(**flags)
        make_files_private()
        configure_logs(limiter=LineLimiter())
        keep_bulk_memory()
        collect_seldom()
        raise_descriptor_limit()
        asyncio.run(_serve(settings, load_kinds()))
    except Exception as failure:
        if settings is not None and settings.takeover and is_away(failure):
            end_turn(settings, str(failure))
        if (error := start_error(failure)) is None:
            raise
        return _report(error)
    return 0


def _report(error: HyperGPUError) -> int:
    """Tell people on stderr, and on stdout the program that waits for the ready line."""
    sys.stderr.write(f"{error}\n")
    line = {"refused": error.reason.name, "detail": error.detail, "fix": error.fix}
    with contextlib.suppress(HyperGPUError):
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()
    return error.reason.exit_code


async def _serve(settings: Settings, kinds: "KindTable") -> None:
    from coordinator.shell.app.startup import CoordinatorApp

    await CoordinatorApp(settings, kinds).run()


if __name__ == "__main__":
    sys.exit(main())
