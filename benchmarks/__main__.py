"""Run benchmarks: print each table and write its metrics to ``benchmarks/results/NAME.json``."""

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import benchmarks
from benchmarks.table import Record, Table, machine, print_table, write_record

RESULTS = Path(__file__).parent / "results"
PIPE_WIDTH = 160
_COLUMNS = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())


def names() -> list[str]:
    """Return every benchmark: the modules of this package, the harness and its parts aside."""
    modules = {module.name for module in pkgutil.iter_modules(benchmarks.__path__)}
    return sorted(modules - {"__main__", "ours", "peers", "table"})


def run_one(name: str, *, is_quick: bool, console: Console) -> None:
    """Run one benchmark, print its table and write its record."""
    run = cast("Callable[[bool], Table]", importlib.import_module(f"benchmarks.{name}").run)
    with Progress(*_COLUMNS, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(name)
        table = run(is_quick)
    print_table(table, console)
    command = f"make bench ONLY={name}{' QUICK=1' if is_quick else ''}"
    write_record(Record(machine(), command, table.metrics), RESULTS / f"{name}.json")


def main() -> None:
    """Run what the command line names, or everything."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=names(), help="one benchmark")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer repeats")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    for name in [options.only] if options.only else names():
        run_one(name, is_quick=options.quick, console=console)


if __name__ == "__main__":
    main()
