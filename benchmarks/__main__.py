"""Run benchmarks: print each table and write its figures to ``benchmarks/results/NAME.json``.

A benchmark in parts shows each part, and writes its figures, as soon as it has run. Quick runs
write nothing: the results hold the figures that documents quote.
"""

import argparse
import importlib
import logging
import pkgutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import benchmarks
from benchmarks.ours.table import (
    BenchmarkParts,
    ResultTable,
    merge_rows,
    print_table,
    rows_of,
    run_parts,
    write_rows,
)
from hypergpu.process import configure_logs

RESULTS = Path(__file__).parent / "results"
PIPE_WIDTH = 160
_COLUMNS = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())


def names() -> list[str]:
    """Return every benchmark: the modules of this package, the harness and its parts aside."""
    modules = {module.name for module in pkgutil.iter_modules(benchmarks.__path__)}
    return sorted(modules - {"__main__", "hooks", "ours", "peers"})


def run_one(name: str, part: str, *, is_quick: bool, console: Console) -> None:
    """Run one benchmark, or a part of it; print its table and write its figures.

    Raises:
        KeyError: It has no such part.
    """
    module = importlib.import_module(f"benchmarks.{name}")
    whole = parts_of(module, is_quick=is_quick)
    with Progress(*_COLUMNS, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(f"{name}/{part}" if part else name)

        def show(table: ResultTable) -> None:
            if not part:
                print_table(table, progress.console)
            if not is_quick:
                record(name, table, is_whole=False)

        if whole is None:
            table = module.run(is_quick)
        else:
            table = run_parts(whole, [part] if part else list(whole.parts), show)
    print_table(table, console)
    if not is_quick:
        record(name, table, is_whole=not table.is_partial)


def record(name: str, table: ResultTable, *, is_whole: bool) -> None:
    """Write a table's figures; those of a whole run replace all earlier ones."""
    day = datetime.now(UTC).date().isoformat()
    rows = rows_of(table.metrics, f"make bench ONLY={name}", day)
    (write_rows if is_whole else merge_rows)(rows, RESULTS / f"{name}.json")


def parts_of(module: ModuleType, *, is_quick: bool) -> BenchmarkParts | None:
    """Return the parts of a benchmark; None when it has none."""
    parts = getattr(module, "parts", None)
    return None if parts is None else parts(is_quick)


def choose(only: str, *, is_quick: bool) -> tuple[str, str]:
    """Split ``NAME`` or ``NAME/PART`` into a benchmark and its part, which is empty for all of it.

    Raises:
        ValueError: There is no such benchmark or part.
    """
    name, _, part = only.partition("/")
    if name not in names():
        raise ValueError(f"there is no benchmark {name!r}; there are {', '.join(names())}")
    if part:
        whole = parts_of(importlib.import_module(f"benchmarks.{name}"), is_quick=is_quick)
        part_names = [] if whole is None else list(whole.parts)
        if part not in part_names:
            raise ValueError(
                f"{name} has no part {part!r}; it has {', '.join(part_names) or 'none'}"
            )
    return name, part


def main() -> None:
    """Run what the command line names, or everything."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", help="one benchmark, NAME, or a part of one, NAME/PART")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer repeats")
    options = parser.parse_args()
    configure_logs(logging.WARNING)
    try:
        choices = [choose(options.only, is_quick=options.quick)] if options.only else None
    except ValueError as error:
        parser.error(str(error))
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    for name, part in choices or [(name, "") for name in names()]:
        run_one(name, part, is_quick=options.quick, console=console)


if __name__ == "__main__":
    main()
