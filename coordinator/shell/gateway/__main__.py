"""A gateway's process: `hypergpu gateway` starts it with friendlier output."""

import argparse
import asyncio
import os
import sys
from typing import Any

import msgspec
from pydantic import ValidationError

from coordinator.shell.gateway.app import GatewayApp
from coordinator.shell.gateway.settings import GatewaySettings
from coordinator.shell.rate import LineLimiter
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.privacy import make_files_private
from hypergpu.process import collect_seldom, configure_logs, raise_descriptor_limit
from hypergpu.stdio import prepare_streams
from hypergpu.wire.credentials import parse_token


def main() -> int:
    """Run one gateway until it is told to end; returns the exit status. The token is on stdin."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        prepare_streams()
        settings = GatewaySettings(**_flags())
        make_files_private()
        configure_logs(limiter=LineLimiter())
        raise_descriptor_limit()
        collect_seldom()
        asyncio.run(_serve(settings, sys.stdin.readline()))
    except HyperGPUError as failure:
        return _report(failure)
    except ValidationError as wrong:
        return _report(_invalid_settings(wrong))
    return 0


def _invalid_settings(wrong: ValidationError) -> HyperGPUError:
    """The settings that are wrong, and how each is set."""
    problems = [
        (str(each["loc"][0]) if each["loc"] else "", each["msg"]) for each in wrong.errors()
    ]
    detail = "; ".join(f"{name}: {problem}" for name, problem in problems)
    variable_names = " and ".join(
        sorted({f"HYPERGPU_GATEWAY_{name.upper()}" for name, _ in problems})
    )
    fix = f"correct {variable_names}, or the flag: see hypergpu gateway --help"
    return HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)


def _flags() -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="hypergpu gateway")
    for name, field in GatewaySettings.model_fields.items():
        is_list = field.annotation == tuple[str, ...]
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            action="append" if is_list else "store",
            default=None,
            help=field.description,
        )
    arguments = vars(parser.parse_args())
    return {name: value for name, value in arguments.items() if value is not None}


async def _serve(settings: GatewaySettings, token_text: str) -> None:
    await GatewayApp(settings, parse_token(token_text)).run()


def _report(error: HyperGPUError) -> int:
    """Tell people on stderr, and on stdout the program that waits for the ready line."""
    sys.stderr.write(f"{error}\n")
    line = {"refused": error.reason.name, "detail": error.detail, "fix": error.fix}
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    return error.reason.exit_code


if __name__ == "__main__":
    sys.exit(main())
