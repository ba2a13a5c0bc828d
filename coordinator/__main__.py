"""`python -m coordinator`, also installed as `hypergpu-coordinator`."""

import argparse
import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from hypergpu.errors import HyperGPUError
from hypergpu.terminal.streams import prepare_streams

if TYPE_CHECKING:
    from coordinator.config import Settings


def main(arguments: list[str] | None = None) -> int:
    """Run one coordinator until it is told to end; returns the exit status."""
    # What gRPC logs of its own accord is said again by our errors, with the fix.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    given = _parser().parse_args(arguments)
    from coordinator.shell.failpoints import NAMES

    if given.list_failpoints:
        for name, meaning in NAMES.items():
            sys.stdout.write(f"{name}\t{meaning}\n")
        return 0
    return _run({name: value for name, value in vars(given).items() if value is not None})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hypergpu-coordinator",
        description="The process that decides. `hypergpu up` starts it with friendlier output.",
        epilog="Every flag is also read from HYPERGPU_COORDINATOR_* in the environment.",
    )
    parser.add_argument("--data-dir", help="journal, models and keys")
    parser.add_argument("--listen", help="address to bind (default 0.0.0.0)")
    parser.add_argument("--port", type=int, help="users and joining nodes (default 7700, 0: free)")
    parser.add_argument("--node-port", type=int, help="joined nodes (default 7701, 0: free)")
    parser.add_argument(
        "--advertise", action="append", metavar="HOST", help="a name to be reached by; repeatable"
    )
    parser.add_argument("--database-url", help="SQLAlchemy URL of the journal")
    parser.add_argument(
        "--plaintext", action="store_true", default=None, help="no TLS; only on loopback"
    )
    parser.add_argument("--disk-quota-bytes", type=int, help="most bytes of blobs (0: no limit)")
    parser.add_argument(
        "--line-mbit-s",
        type=int,
        help="what this machine's line carries towards it; uploads that would crowd it wait for"
        " each other (0: not known, nobody waits)",
    )
    parser.add_argument("--heartbeat-interval-ms", type=int, help="default 5000")
    parser.add_argument("--lost-after-ms", type=int, help="default 15000")
    parser.add_argument("--read-timeout-ms", type=int, help="default 10000")
    parser.add_argument("--list-failpoints", action="store_true", help="names for tests, then exit")
    return parser


def _run(flags: dict[str, Any]) -> int:
    import asyncio

    from coordinator.config import Settings
    from coordinator.shell.app.start_errors import start_error
    from coordinator.shell.failpoints import VARIABLE, arm
    from hypergpu.process.logs import configure_logs
    from hypergpu.process.memory import keep_bulk_memory

    flags.pop("list_failpoints", None)
    try:
        prepare_streams()
        arm(os.environ.get(VARIABLE, ""))
        settings = Settings(**flags)
        configure_logs()
        keep_bulk_memory()
        asyncio.run(_serve(settings))
    except Exception as failure:
        if (error := start_error(failure)) is None:
            raise
        return _report(error)
    return 0


def _report(error: HyperGPUError) -> int:
    """Say it to people, and to whoever waits for the line that says that calls are served."""
    import msgspec

    sys.stderr.write(f"{error}\n")
    line = {"refused": error.reason.name, "detail": error.detail, "fix": error.fix}
    with contextlib.suppress(HyperGPUError):
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()
    return error.reason.exit_code


async def _serve(settings: "Settings") -> None:
    from coordinator.shell.app.startup import Coordinator

    await Coordinator(settings).run()


if __name__ == "__main__":
    sys.exit(main())
