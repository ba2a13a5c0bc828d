"""Break the ledger in many small ways and see whether its tests notice.

Each mutant is one change on one line, compiled on its own without optimizer and run against the
unit tests, and if it survives those, against the invariants. A mutant whose code is that of the
original changes nothing and is left out.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from contracts.compile import ARTIFACTS, CONTRACTS, MODULES, ROOT, SETTINGS, sources

FORGE = next((MODULES / "@foundry-rs").glob("forge-*/bin/forge"), Path("forge"))
WORK = ROOT / "build" / "contracts" / "mutants"
# Three seconds a mutant instead of fourteen; the tests pass on what this makes of the original too.
QUICK = {"evmVersion": SETTINGS["evmVersion"], "optimizer": {"enabled": False}}
CHANGES = (
    (r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > "),
    (r" == ", " != "), (r" != ", " == "), (r" \+ ", " - "), (r" - ", " + "),
    (r" \+= ", " -= "), (r" -= ", " += "), (r" \* ", " / "), (r" / ", " * "), (r" && ", " || "),
    (r" \|\| ", " && "), (r"\(!", "("), (r"= true;", "= false;"), (r"\? (\w+) :", "? 0 :"),
    (r"if \((?!\!).*\) revert", "if (false) revert"), (r"if \(.*\) return", "if (false) return"),
    (r"\bnonReentrant\b", ""), (r"\bwhenNotPaused\b", ""), (r"\b10_000\b", "9_999"),
    (r"^\s+(_\w+|\w+\.lock)\(.*\);$", ""), (r"^\s+emit .*\);$", ""),
    (r"^\s+[\w.\[\]]+ [-+]?= .*;$", ""),
)  # fmt: skip
SURVIVED, KILLED, SAME, BROKEN = "survived", "killed", "same code", "does not compile"


class Mutant(NamedTuple):
    """One changed line."""

    source: str
    line: int
    was: str
    now: str


def mutants(texts: dict[str, str]) -> Iterator[Mutant]:
    """Yield every change of every line that holds code of a function."""
    for source, text in sorted(texts.items()):
        if source.startswith(("interfaces/", "tokens/", "bench/")):
            continue
        for number, line in enumerate(text.splitlines()):
            if re.match(r"\s*(///|//|import|using|event|error|mapping|pragma)", line):
                continue
            for pattern, replacement in CHANGES:
                for found in re.finditer(pattern, line):
                    changed = found.expand(replacement)
                    yield Mutant(
                        source, number, line, line[: found.start()] + changed + line[found.end() :]
                    )


def bytecode(texts: dict[str, str], name: str) -> str | None:
    """Compile one contract with few optimizer steps; None where it does not compile."""
    wanted = {f"{name}.sol": {name: ["evm.bytecode.object"]}}
    request = {
        "language": "Solidity",
        "sources": {source: {"content": text} for source, text in texts.items()},
        "settings": {**QUICK, "outputSelection": wanted},
    }
    command = [str(CONTRACTS / "tools" / "solc"), "--standard-json", "--base-path", str(MODULES)]
    answer = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, check=True
    )
    output: dict[str, Any] = json.loads(answer.stdout)
    if any(error["severity"] == "error" for error in output.get("errors", [])):
        return None
    return "0x" + str(output["contracts"][f"{name}.sol"][name]["evm"]["bytecode"]["object"])


def passes(folder: Path, *choice: str) -> bool:
    """Whether forge's tests pass on the contracts of a folder."""
    environment = {
        **os.environ,
        "HYPERGPU_ARTIFACTS": os.path.relpath(folder, CONTRACTS),
        "FOUNDRY_FUZZ_RUNS": "20",
        "FOUNDRY_INVARIANT_RUNS": "10",
    }
    command = [str(FORGE), "test", "--offline", "--fail-fast", *choice]
    return (
        subprocess.run(
            command, cwd=CONTRACTS, env=environment, capture_output=True, check=False
        ).returncode
        == 0
    )


def write(folder: Path, codes: dict[str, str]) -> None:
    """Put contracts in place of the committed ones, in a folder of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    for artifact in ARTIFACTS.glob("*.json"):
        (folder / artifact.name).write_bytes(artifact.read_bytes())
    for name, code in codes.items():
        (folder / f"{name}.json").write_text(json.dumps({"bytecode": code}), encoding="utf-8")


class Judge:
    """Tells what becomes of mutants, with what the original compiles to for comparison."""

    def __init__(self, texts: dict[str, str]) -> None:
        """Compile the originals and see that they pass.

        Raises:
            RuntimeError: the tests fail without any mutant.
        """
        self._texts = texts
        self._codes = {name: bytecode(texts, name) for name in ("TrainingLedger", "MerkleLedger")}
        folder = WORK / "original"
        write(folder, {name: code for name, code in self._codes.items() if code})
        if not passes(folder, "--no-match-contract", "GasTest"):
            raise RuntimeError(
                "the tests fail on the contracts as they are. Fix: make contracts-test"
            )

    def fate(self, number: int, mutant: Mutant) -> str:
        """Compile one mutant and run the tests against it."""
        lines = self._texts[mutant.source].splitlines()
        lines[mutant.line] = mutant.now
        texts = {**self._texts, mutant.source: "\n".join(lines) + "\n"}
        name = "MerkleLedger" if mutant.source == "MerkleLedger.sol" else "TrainingLedger"
        code = bytecode(texts, name)
        if code is None or code == self._codes[name]:
            return BROKEN if code is None else SAME
        folder = WORK / str(number)
        write(folder, {name: code})
        if not passes(folder, "--no-match-contract", "GasTest|InvariantsTest"):
            return KILLED
        return SURVIVED if passes(folder, "--match-contract", "InvariantsTest") else KILLED


class Score(NamedTuple):
    """What became of all mutants of a run."""

    fates: Counter[str]
    survivors: list[Mutant]

    @property
    def percent(self) -> float:
        """Killed among those that changed something and compiled."""
        judged = self.fates[KILLED] + self.fates[SURVIVED]
        return 100 * self.fates[KILLED] / judged if judged else 100.0


def score(sample: int = 0, seed: int = 1) -> Score:
    """Judge ``sample`` mutants drawn by ``seed``, or all for 0: some five seconds of a core each.

    Raises:
        RuntimeError: the tests fail without any mutant.
    """
    texts = sources()
    chosen = list(dict.fromkeys(mutants(texts)))
    if sample:
        chosen = random.Random(seed).sample(chosen, min(sample, len(chosen)))
    judge = Judge(texts)
    fates: Counter[str] = Counter()
    survivors = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        judged = pool.map(judge.fate, range(len(chosen)), chosen)
        for mutant, fate in zip(chosen, judged, strict=True):
            fates[fate] += 1
            if fate == SURVIVED:
                survivors.append(mutant)
                print(f"{mutant.source}:{mutant.line + 1} survived: {mutant.now.strip()}")
                print(f"    it was: {mutant.was.strip()}", flush=True)
    return Score(fates, survivors)


def main() -> int:
    """Print each mutant that survives, and the score; exit 1 below ``--least``."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--sample", type=int, default=0, help="so many, drawn by --seed; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least", type=float, default=90.0, help="the score to reach, in percent")
    options = parser.parse_args()
    found = score(options.sample, options.seed)
    print(f"{dict(found.fates)}; mutation score {found.percent:.1f} %")
    return 0 if found.percent >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
