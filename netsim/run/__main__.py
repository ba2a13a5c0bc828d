"""`python -m netsim.run CHOICES`: what `hypergpu netsim run` starts over the links it opened."""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

import msgspec

from hypergpu.errors import HyperGPUError
from hypergpu.sites import told_sites
from hypergpu.terminal.failure import report as report_error
from hypergpu.terminal.output import note, say, say_json
from hypergpu.terminal.views import open_view
from hypergpu.units import several
from netsim.link.error import NetsimError
from netsim.run.choices import Choices, chosen_world
from netsim.run.job import RunOrder, SilentView, run_job
from netsim.run.report import RunReport, summary_lines

UNFINISHED_STATUS = 1


def main() -> int:
    """Run the job; the exit status is 1 when it ended otherwise than it should."""
    options = _options()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    try:
        report = _run(options)
    except HyperGPUError as error:
        return report_error(error)
    except KeyboardInterrupt:
        return 130
    finally:
        note(f"logs: {options.out / 'logs'}")
    if options.json:
        say_json(report)
    else:
        for line in summary_lines(report):
            say(line)
    return 0 if report.is_good else UNFINISHED_STATUS


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _run(options: argparse.Namespace) -> RunReport:
    sites = told_sites()
    if sites is None:
        fix = "start this with: hypergpu netsim run WORLD.toml"
        raise NetsimError("no links are held open for this program", fix)
    choices = msgspec.json.decode(options.choices, type=Choices)
    order = RunOrder(
        world=chosen_world(choices),
        beside=choices.beside,
        folder=options.out,
        worker=options.worker,
        give_up_after_s=options.give_up_after,
    )
    if options.json:
        return run_job(order, sites, SilentView())
    title = f"{order.world.name} over {sites.backend}: {several(len(order.world.nodes), 'node')}"
    with open_view(title=title) as view:
        return run_job(order, sites, view)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m netsim.run", description=__doc__)
    parser.add_argument("choices", help="what to run, as JSON")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--worker", default="auto")
    parser.add_argument("--give-up-after", type=float, default=3600.0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
