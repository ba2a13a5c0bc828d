"""A compiler that stays loaded: loading it takes longer than compiling a mutant."""

import json
import subprocess
from typing import Any

from contracts.compile import CONTRACTS, MODULES, SETTINGS

# No optimizer: the tests pass on what this makes of the original too.
QUICK = {"evmVersion": SETTINGS["evmVersion"], "optimizer": {"enabled": False}}


class SolidityCompiler:
    """One process of the pinned compiler, for one thread at a time."""

    def __init__(self) -> None:
        """Start the process."""
        solc = str(CONTRACTS / "tools" / "solc")
        self._process = subprocess.Popen(
            [solc, "--standard-json-lines", "--base-path", str(MODULES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """Stop the process."""
        self._process.communicate()

    def bytecode(self, texts: dict[str, str], name: str) -> str | None:
        """Compile one contract without optimizer; None where it does not compile.

        Raises:
            RuntimeError: the compiler is gone.
        """
        selection = {f"{name}.sol": {name: ["evm.bytecode.object"]}}
        request = {
            "language": "Solidity",
            "sources": {source: {"content": text} for source, text in texts.items()},
            "settings": {**QUICK, "outputSelection": selection},
        }
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the compiler was started without pipes")
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        answer = stdout.readline()
        if not answer:
            raise RuntimeError("the compiler stopped without an answer. Fix: make contracts")
        output: dict[str, Any] = json.loads(answer)
        if any(error["severity"] == "error" for error in output.get("errors", [])):
            return None
        return "0x" + str(output["contracts"][f"{name}.sol"][name]["evm"]["bytecode"]["object"])
