"""Break the ledger in many small ways and see whether its tests notice.

Each mutant is one change on one line, compiled on its own without optimizer and run against the
unit tests, and if it survives those, against the invariants. A mutant whose code is that of the
original changes nothing and is left out. One that changes the code and not what it does is
explained in ``equivalent.json`` and counts as a survivor all the same.
"""

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from contracts.compile import ARTIFACTS, CONTRACTS, ROOT, sources
from contracts.tools.compiler import SolidityCompiler
from contracts.tools.forge import build, forge_test

NAME = "TrainingLedger"
WORK = ROOT / "build" / "contracts" / "mutants"
EQUIVALENT = CONTRACTS / "tools" / "equivalent.json"
CHANGES = (
    (r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > "),
    (r" == ", " != "), (r" != ", " == "), (r" \+ ", " - "), (r" - ", " + "),
    (r" \+= ", " -= "), (r" -= ", " += "), (r" \* ", " / "), (r" / ", " * "), (r" && ", " || "),
    (r" \|\| ", " && "), (r" \| ", " & "), (r" << ", " >> "), (r" >> ", " << "), (r"\(!", "("),
    (r"= true;", "= false;"), (r"\? (\w+) :", "? 0 :"),
    (r"if \((?!\!).*\) revert", "if (false) revert"), (r"if \(.*\) return", "if (false) return"),
    (r"\bnonReentrant\b", ""), (r"\bMath\.min\b", "Math.max"), (r" continue;", " break;"),
    (r"^\s+(_\w+|\w+\.lock)\(.*\);$", ""), (r"^\s+emit .*\);$", ""),
    (r"^\s+[\w.\[\]]+ [-+]?= .*;$", ""),
)  # fmt: skip
LEAST_PERCENT = 95.0
"""Share of the mutants that some test must notice."""
SURVIVED, KILLED, SAME, BROKEN = "survived", "killed", "same code", "does not compile"
UNIT = ("--no-match-contract", "GasTest|InvariantsTest")
RANDOM = ("--match-contract", "InvariantsTest")


class Mutant(NamedTuple):
    """One changed line."""

    source: str
    line: int
    was: str
    now: str

    @property
    def name(self) -> str:
        """Say which it is: lines move, what they hold stays."""
        return f"{self.source}: {self.was.strip()} -> {self.now.strip()}"


def mutants(texts: dict[str, str]) -> Iterator[Mutant]:
    """Yield every change of every line that holds code of a function."""
    for source, text in sorted(texts.items()):
        if source.startswith(("interfaces/", "tokens/", "bench/")):
            continue
        for number, line in enumerate(text.splitlines()):
            if re.match(r"\s*(///|//|import|using|event|error|mapping|pragma)", line):
                continue
            code = line.partition("//")[0].rstrip()
            for pattern, replacement in CHANGES:
                for match in re.finditer(pattern, code):
                    mutant_text = match.expand(replacement)
                    now = line[: match.start()] + mutant_text + line[match.end() :]
                    if now != line:
                        yield Mutant(source, number, line, now)


def every_mutant(texts: dict[str, str]) -> list[Mutant]:
    """Return each mutant once, in a fixed order."""
    return list(dict.fromkeys(mutants(texts)))


def one_of(part: int, texts: dict[str, str]) -> list[Mutant]:
    """Return every ``part``-th mutant, the first of them given by the sources.

    So they come from all contracts in proportion; the same sources have the same ones, and what
    makes a run fail is a change and never the draw; and changed sources may have others.
    """
    content = json.dumps(texts, sort_keys=True).encode()
    first = int.from_bytes(sha256(content).digest()) % part
    return every_mutant(texts)[first::part]


def passes(folder: Path, *choice: str) -> bool:
    """Whether forge's tests pass on the contracts of a folder."""
    settings = {
        "HYPERGPU_ARTIFACTS": os.path.relpath(folder, CONTRACTS),
        "FOUNDRY_FUZZ_RUNS": "20",
        "FOUNDRY_INVARIANT_RUNS": "10",
        # What broke one mutant would be tried on the next ones.
        "FOUNDRY_FUZZ_FAILURE_PERSIST_DIR": str(folder / "failures"),
        "FOUNDRY_INVARIANT_FAILURE_PERSIST_DIR": str(folder / "failures"),
    }
    return forge_test("--fail-fast", *choice, **settings).returncode == 0


def write(folder: Path, code: str) -> None:
    """Put a ledger in place of the committed one, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for artifact in ARTIFACTS.glob("*.json"):
        (folder / artifact.name).write_bytes(artifact.read_bytes())
    (folder / f"{NAME}.json").write_text(json.dumps({"bytecode": code}), encoding="utf-8")


class MutantJudge:
    """Tells what becomes of mutants, with what the original compiles to for comparison."""

    def __init__(self, texts: dict[str, str], compilers: list[SolidityCompiler]) -> None:
        """Compile the originals and see that they pass.

        Raises:
            RuntimeError: the tests fail without any mutant.
        """
        self._texts = texts
        self._idle: SimpleQueue[SolidityCompiler] = SimpleQueue()
        for compiler in compilers:
            self._idle.put(compiler)
        self._code = compilers[0].bytecode(texts, NAME)
        folder = WORK / "original"
        write(folder, self._code or "")
        if not (passes(folder, *UNIT) and passes(folder, *RANDOM)):
            raise RuntimeError(
                "the tests fail on the contracts as they are. Fix: make contracts-test"
            )

    def fate(self, number: int, mutant: Mutant) -> str:
        """Compile one mutant and run the tests against it."""
        lines = self._texts[mutant.source].splitlines()
        lines[mutant.line] = mutant.now
        texts = {**self._texts, mutant.source: "\n".join(lines) + "\n"}
        compiler = self._idle.get()
        code = compiler.bytecode(texts, NAME)
        self._idle.put(compiler)
        if code is None or code == self._code:
            return BROKEN if code is None else SAME
        folder = WORK / str(number)
        write(folder, code)
        return SURVIVED if passes(folder, *UNIT) and passes(folder, *RANDOM) else KILLED


class MutationScore(NamedTuple):
    """What became of all mutants of a run."""

    fates: Counter[str]
    survivors: list[Mutant]

    @property
    def judged_count(self) -> int:
        """How many changed something and compiled."""
        return self.fates[KILLED] + self.fates[SURVIVED]

    @property
    def percent(self) -> float:
        """Killed among the judged_count."""
        return 100 * self.fates[KILLED] / self.judged_count if self.judged_count else 100.0


def score(chosen: Sequence[Mutant]) -> MutationScore:
    """MutantJudge mutants, as many at a time as there are cores: about a second of a core each.

    Raises:
        RuntimeError: the tests fail without any mutant.
    """
    build()
    explanations: dict[str, str] = json.loads(EQUIVALENT.read_bytes())
    fates: Counter[str] = Counter()
    survivors = []
    workers = len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        compilers = [stack.enter_context(closing(SolidityCompiler())) for _ in range(workers)]
        judge = MutantJudge(sources(), compilers)
        judged_count = stack.enter_context(ThreadPoolExecutor(workers)).map(
            judge.fate, range(len(chosen)), chosen
        )
        for mutant, fate in zip(chosen, judged_count, strict=True):
            fates[fate] += 1
            if fate == SURVIVED:
                survivors.append(mutant)
                why = explanations.get(mutant.name, "no test notices")
                print(f"survived, {mutant.name}\n    line {mutant.line + 1}: {why}", flush=True)
    return MutationScore(fates, survivors)


def main() -> int:
    """Print each mutant that survives, and the score; exit 1 below ``--least``."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--part", type=int, default=1, help="judge one of so many, from all places")
    parser.add_argument("--least", type=float, default=LEAST_PERCENT, help="percent to reach")
    options = parser.parse_args()
    outcome = score(one_of(options.part, sources()))
    print(f"{dict(outcome.fates)}; mutation score {outcome.percent:.1f} %")
    return 0 if outcome.percent >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
