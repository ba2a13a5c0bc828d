"""The house itself: lines of code against the tree before it was rebuilt, and its structure."""

from pathlib import Path

import msgspec

from benchmarks.house.offenders import duplicate_classes
from benchmarks.house.tree import (
    ROOT,
    LineCounts,
    both_way_pairs,
    circular_modules,
    count_lines,
    files,
)
from benchmarks.ours.table import ResultTable

_WAY = "update_way_files"
_STRUCTURE = (_WAY, "duplicate_classes", "both_way_pairs", "circular_modules")
_BEFORE = Path(__file__).with_name("before.json")


class Before(msgspec.Struct, frozen=True):
    """The lines of the tree before the rebuilding."""

    commit: str
    lines: LineCounts
    update_way_files: int
    """Traced as now, at dc991cd, before coordinator and pay were rebuilt."""


def lines_before() -> Before:
    """Read the stored count of the tree before; a test counts a part of it again."""
    return msgspec.json.decode(_BEFORE.read_bytes(), type=Before)


def run(is_quick: bool) -> ResultTable:
    """Count lines per package, breaches of structure, and the files on one update's way."""
    before = lines_before()
    old, new = before.lines, count_lines(ROOT, map(str, files()))
    metrics = {
        "product_lines": new.product,
        "product_over_before": new.product / old.product,
        "pay_lines": new.pay,
        "pay_over_before": new.pay / old.pay,
        "tests_lines": new.tests,
        "tests_over_before": new.tests / old.tests,
        "duplicate_classes": len({offender.name for offender in duplicate_classes()}),
        "both_way_pairs": len(both_way_pairs(ROOT)),
        "circular_modules": len(circular_modules(ROOT)),
    }
    if not is_quick:
        # It needs the client and gRPC, which the rules that import this package do not.
        from benchmarks.house.trace import traced_files

        metrics[_WAY] = len(traced_files())
    folders = sorted({*old.packages, *new.packages})
    counts = [(name, old.packages.get(name, 0), new.packages.get(name, 0)) for name in folders]
    counts += [
        ("product (all but tests)", old.product, new.product),
        ("pay, of the product", old.pay, new.pay),
    ]
    return ResultTable(
        title="The house: lines of Python with code on them",
        columns=("package", "before", "now", "ratio"),
        rows=[_row(*count) for count in counts]
        + [(name, "", str(metrics[name]), "") for name in _STRUCTURE if name in metrics],
        metrics=metrics,
        notes=(
            f"before: commit {before.commit[:7]}; without blanks, comments, docstrings and stubs",
        ),
    )


def _row(name: str, old: int, new: int) -> tuple[str, str, str, str]:
    ratio = f"{new / old:.2f}" if old else ""
    return name, f"{old:,}", f"{new:,}", ratio
