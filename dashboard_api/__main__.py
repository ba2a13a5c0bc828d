"""`python -m dashboard_api`: the page's server. `hypergpu up` and `hypergpu dashboard` start it."""

import argparse
import asyncio
import os
import sys
from typing import Any

import msgspec

from dashboard_api.config import DashboardSettings
from hypergpu.errors import HyperGPUError
from hypergpu.process.logs import configure_logs


def main(arguments: list[str] | None = None) -> int:
    """Serve until told to end; returns the exit status."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    flags = vars(_parser().parse_args(arguments))
    try:
        settings = DashboardSettings(**{k: v for k, v in flags.items() if v is not None})
        configure_logs()
        asyncio.run(_serve(settings))
    except HyperGPUError as failure:
        sys.stderr.write(f"{failure}\n")
        line = {"refused": failure.reason.name, "detail": failure.detail, "fix": failure.fix}
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        return failure.reason.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dashboard_api",
        epilog="Every flag is also read from HYPERGPU_DASHBOARD_* in the environment.",
    )
    actions: dict[Any, str] = {bool: "store_true", tuple[str, ...]: "append"}
    for name, field in DashboardSettings.model_fields.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            action=actions.get(field.annotation, "store"),
            default=None,
            help=f"{field.description} (default: {field.default or 'none'})",
        )
    return parser


async def _serve(settings: DashboardSettings) -> None:
    from dashboard_api.shell.server import serve
    from dashboard_api.shell.targets import dashboard_target

    await serve(settings, dashboard_target(settings))


if __name__ == "__main__":
    sys.exit(main())
