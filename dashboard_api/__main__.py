"""`python -m dashboard_api`: the page's server. `hypergpu up` and `hypergpu dashboard` start it."""

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from dashboard_api.config import DashboardSettings
from hypergpu.errors import HyperGPUError
from hypergpu.privacy import make_files_private, require_private_folder
from hypergpu.process import configure_logs
from hypergpu.protocol import version_text


def main(arguments: list[str] | None = None) -> int:
    """Serve until told to end; returns the exit status."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    flags = vars(_parser().parse_args(arguments))
    job, out = flags.pop("export_job"), flags.pop("out")
    try:
        settings = DashboardSettings(**{k: v for k, v in flags.items() if v is not None})
        configure_logs()
        asyncio.run(_export(settings, job, Path(out)) if job else _serve(settings))
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
    parser.add_argument("--version", action="version", version=version_text("dashboard_api"))
    parser.add_argument("--export-job", metavar="JOB", help="write a job as one file, then exit")
    parser.add_argument("--out", metavar="FILE", default="job.html", help="file of --export-job")
    return parser


async def _export(settings: DashboardSettings, job: str, out: Path) -> None:
    from dashboard_api.shell.export import export_page
    from dashboard_api.shell.page import PAGE_FOLDER
    from dashboard_api.shell.targets import dashboard_target

    size_bytes = await export_page(dashboard_target(settings), job, out, PAGE_FOLDER)
    sys.stdout.write(f"{out}: {size_bytes} bytes\n")


async def _serve(settings: DashboardSettings) -> None:
    from dashboard_api.shell.server import serve
    from dashboard_api.shell.targets import dashboard_target

    make_files_private()
    require_private_folder(settings.data_dir)
    await serve(settings, dashboard_target(settings))


if __name__ == "__main__":
    sys.exit(main())
