"""Lines of `doctor` and `env`."""

from hypergpu.cli.machine.checks import FAIL, OK, WARN, Check
from hypergpu.cli.machine.environment import Environment
from hypergpu.terminal.figures import size
from hypergpu.terminal.output import is_rich

_COLOURS = {OK: "32", WARN: "33", FAIL: "31"}
_NAME_WIDTH = 12


def verdict_line(check: Check) -> str:
    """A check with its fix, on one line."""
    mark = f"{check.verdict:<4}"
    if is_rich():
        mark = f"\x1b[{_COLOURS[check.verdict]}m{mark}\x1b[0m"
    fix = f". Fix: {check.fix}" if check.fix else ""
    return f"{mark}  {check.name:<{_NAME_WIDTH}}{check.what}{fix}"


def environment_lines(found: Environment) -> list[str]:
    """The block to paste."""
    lines = [
        "```",
        f"python      {found.python}",
        f"system      {found.system}",
        f"processors  {found.processors}, memory {size(found.memory_bytes)}",
    ]
    for title, rows in (
        ("packages", found.packages),
        ("settings", found.settings),
        ("variables", found.variables),
        ("workloads", found.workloads),
    ):
        width = max((len(name) for name in rows), default=0)
        lines += [f"{title}:", *[f"  {name:<{width}}  {value}" for name, value in rows.items()]]
    lines += [f"complaint: {text}" for text in found.complaints]
    return [*lines, "```"]
