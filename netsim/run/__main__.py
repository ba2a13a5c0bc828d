"""`python -m netsim.run ORDER`: what `hypergpu netsim run` starts over the links it opened."""

import signal
import sys
from pathlib import Path
from types import FrameType

import msgspec

from hypergpu.errors import HyperGPUError
from hypergpu.sites import told_sites
from hypergpu.units import several
from hypergpu.user.terminal.commands import report_error
from hypergpu.user.terminal.output import note
from hypergpu.user.terminal.watch import WatchView, open_view
from netsim.link import NetsimError
from netsim.run.choices import RunOrder, chosen_world
from netsim.run.job import run_job
from netsim.run.report import RunReport, say_report


def main() -> int:
    """Run the job; the exit status is 1 when it ended otherwise than it should."""
    order = msgspec.json.decode(sys.argv[1], type=RunOrder)
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    try:
        report = _run(order)
    except HyperGPUError as error:
        return report_error(error)
    except KeyboardInterrupt:
        return 130
    finally:
        note(f"logs: {Path(order.folder) / 'logs'}")
    return say_report(report, is_json=order.is_json)


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _run(order: RunOrder) -> RunReport:
    sites = told_sites()
    if sites is None:
        fix = "start this with: hypergpu netsim run WORLD.toml"
        raise NetsimError("no links are held open for this program", fix)
    world = chosen_world(order.choices)
    if order.is_json:
        return run_job(world, order, sites, WatchView())
    title = f"{world.name} over {sites.backend}: {several(len(world.nodes), 'node')}"
    with open_view(title=title) as view:
        return run_job(world, order, sites, view)


if __name__ == "__main__":
    sys.exit(main())
