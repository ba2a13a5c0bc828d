"""Have slither look for known mistakes; every High or Medium finding is explained or it fails.

Slither reads one file at a time, in a copy without forge's settings: over a whole forge project it
loses references and then finds nothing without saying so. What it cannot read it passes over, as
only its log says. To be sure of both, it is first shown a contract with a mistake, and then one
with a function that it passes over.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from contracts.compile import CONTRACTS, MODULES, ROOT, sources

SLITHER = ROOT / ".venv-slither" / "bin" / "slither"
AUDITED = "TrainingLedger.sol"
EXPLAINED = CONTRACTS / "tools" / "explained.json"
GRAVE = {"High", "Medium"}
MISTAKE = """// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

contract Mistake {
    function spend(address payable to) external {
        (bool sent,) = to.call{value: address(this).balance}("");
        sent;
    }
}
"""
PASSED_OVER = {
    "One.sol": "pragma solidity 0.8.37;\ninterface Same { function first() external; }\n",
    "Two.sol": "pragma solidity 0.8.37;\ninterface Same { function second() external; }\n",
    "Clash.sol": """pragma solidity 0.8.37;
import {Same as First} from "./One.sol";
import {Same as Second} from "./Two.sol";

contract Clash {
    function both(First first, Second second) external { first.first(); second.second(); }
}
""",
}
"""Slither mixes up two interfaces of one name."""


class PassedOverError(RuntimeError):
    """Slither says nothing of a function, since it cannot read it."""


def findings(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return what slither's detectors say about one file and what it imports of ours.

    Raises:
        PassedOverError: slither could not read a function of ours in it.
        RuntimeError: nor the file at all.
    """
    command = [
        str(SLITHER), name, "--json", "-", "--json-types", "detectors,console",
        "--solc", str(CONTRACTS / "tools" / "solc"),
        "--solc-args", "--evm-version prague",
        "--filter-paths", "openzeppelin",
    ]  # fmt: skip
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    try:
        report = json.loads(answer.stdout)
    except ValueError:
        report = {"success": False}
    if not report["success"]:
        raise RuntimeError(f"slither cannot read {name}: {answer.stderr[-2000:]}")
    # Its log is in the report alone: with that on stdout it prints nothing else anywhere.
    log = report["results"]["console"]["stderr"].splitlines()
    passed_over = [line for line in log if "generate IR" in line and "@openzeppelin" not in line]
    if passed_over:
        raise PassedOverError(f"slither passes over functions of {name}: {passed_over}")
    return list(report["results"].get("detectors", []))


def place(finding: dict[str, Any]) -> str:
    """Name a finding by its detector and the first thing it is about: lines move, names stay."""
    first: dict[str, Any] = finding["elements"][0] if finding["elements"] else {"name": "?"}
    parent = first.get("type_specific_fields", {}).get("parent", {}).get("name", "")
    return f"{finding['check']}: {parent}.{first['name']}".replace(": .", ": ")


def blindness(folder: Path) -> str:
    """Why slither is not to be believed; empty: it finds a mistake, and says what it skips."""
    if not [finding for finding in findings(folder, "Mistake.sol") if finding["impact"] == "High"]:
        return "slither finds nothing in a contract that has a mistake"
    try:
        findings(folder, "Clash.sol")
    except PassedOverError:
        return ""
    return "slither does not say that it passes over a function"


def main() -> int:
    """Print each grave finding that ``explained.json`` does not explain; exit 1 if there is one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "@openzeppelin").symlink_to(MODULES / "@openzeppelin")
        for source, text in {**sources(), "Mistake.sol": MISTAKE, **PASSED_OVER}.items():
            (folder / source).parent.mkdir(exist_ok=True)
            (folder / source).write_text(text, encoding="utf-8")
        if why := blindness(folder):
            print(why, file=sys.stderr)
            return 1
        grave = {
            place(finding): finding["description"].strip()
            for finding in findings(folder, AUDITED)
            if finding["impact"] in GRAVE
        }
    explanations: dict[str, str] = json.loads(EXPLAINED.read_bytes())
    for name in sorted(grave.keys() - explanations.keys()):
        print(f"{name}\n    {grave[name]}", file=sys.stderr)
    for name in sorted(explanations.keys() - grave.keys()):
        print(f"{name} is explained and not found any more", file=sys.stderr)
    print(f"slither: {len(grave)} findings of High or Medium impact, {len(explanations)} explained")
    return 0 if grave.keys() == explanations.keys() else 1


if __name__ == "__main__":
    sys.exit(main())
