"""A comparison on the screen."""

from hypergpu.cli.compare.compare import Files
from hypergpu.cli.compare.comparison import Comparison
from hypergpu.cli.compare.table import columns, footnotes, rows
from hypergpu.terminal.output import say, say_json, say_table


def tell(comparison: Comparison, files: Files, *, as_json: bool) -> None:
    """The table with what must be known to read it, or one JSON document."""
    if as_json:
        say_json(comparison)
        return
    say()
    say_table(columns(comparison), rows(comparison), empty="nothing was compared")
    for line in footnotes(comparison):
        say(line)
    say(f"written: {files.json}, {files.chart}")
