"""Lines of hand-written Python with code on them: no blanks, comments or docstrings."""

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import msgspec

GENERATED = "hypergpu/v1/*"
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
PAY = (
    # As it was.
    "coordinator/core/metering/*",
    "coordinator/core/settlement/*",
    "coordinator/shell/chain/*",
    "coordinator/shell/journal/ledger/*",
    "coordinator/shell/journal/migrations/versions/r0002_receipts_and_outbox.py",
    "coordinator/shell/journal/sql/ledger/*",
    "coordinator/shell/metering/*",
    "coordinator/shell/servicers/node/held.py",
    "coordinator/shell/servicers/user/owing.py",
    "gpu_node/shell/link/earnings.py",
    "gpu_node/shell/state/wallet.py",
    "hypergpu/chain/*",
    "hypergpu/cli/commands/deploy.py",
    "hypergpu/cli/commands/ledger.py",
    "hypergpu/cli/commands/proof.py",
    "hypergpu/cli/demo/metered.py",
    "hypergpu/cli/demo/settlement.py",
    "hypergpu/cli/demo/stakes.py",
    "hypergpu/cli/deployment/*",
    "hypergpu/cli/ledger/*",
    "hypergpu/jobfile/pay.py",
    "hypergpu/ledger/*",
    "hypergpu/wire/ledger.py",
    # As it is: quality is measured for trust too, but its rule was counted as pay before.
    "contracts/*",
    "coordinator/core/quality/*",
    "coordinator/shell/app/payments.py",
    "gpu_node/shell/state/receipts.py",
    "hypergpu/statements/*",
    "hypergpu/wire/statements.py",
    "payments/*",
)
"""Files of pay, in the tree before the rebuilding and in this one; keys that sign are identity."""


class LineCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Code lines of a tree."""

    packages: dict[str, int]
    """Per top-level folder."""
    pay: int
    solidity: int

    @property
    def tests(self) -> int:
        return self.packages.get("tests", 0)

    @property
    def product(self) -> int:
        """Everything but the tests."""
        return sum(self.packages.values()) - self.tests


def code_lines(source: str) -> int:
    """Count a Python file's lines that hold a token of code."""
    prose = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - prose)


def solidity_lines(source: str) -> int:
    """Count a Solidity file's lines that are neither blank nor only a comment."""
    stripped = (line.strip() for line in source.splitlines())
    return sum(1 for line in stripped if line and not line.startswith(("//", "/*", "*")))


def count_lines(root: Path, paths: Iterable[str]) -> LineCounts:
    """Count a tree.

    Args:
        root: Its folder.
        paths: Its tracked files, relative to the root.
    """
    packages: Counter[str] = Counter()
    pay = solidity = 0
    for name in paths:
        path = PurePosixPath(name)
        if path.suffix == ".sol" and not {"bench", "test"} & {*path.parts}:
            solidity += solidity_lines((root / name).read_text(encoding="utf-8"))
        if path.suffix != ".py" or path.match(GENERATED):
            continue
        count = code_lines((root / name).read_text(encoding="utf-8"))
        packages[path.parts[0]] += count
        pay += count if is_pay(path) else 0
    return LineCounts(packages=dict(sorted(packages.items())), pay=pay, solidity=solidity)


def is_pay(path: PurePosixPath) -> bool:
    """Whether a file lies in a folder of `PAY`, at any depth, or is named there."""
    name = str(path)
    return any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
        for pattern in PAY
    )
