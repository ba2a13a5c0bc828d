"""Compile the contracts into ``artifacts/``: ABI and bytecode, the same bits on every machine.

The compiler is the pinned npm package behind ``tools/solc``, so nothing is downloaded here. What
came out is kept in ``build/contracts`` under the digest of everything that went in.
"""

import argparse
import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import solcx

ROOT = Path(__file__).parents[1]
CONTRACTS = ROOT / "contracts"
ARTIFACTS = CONTRACTS / "artifacts"
MODULES = ROOT / "node_modules"
CACHE = ROOT / "build" / "contracts"
PUBLISHED = {
    "NaiveLedger": "bench/NaiveLedger.sol",
    "TestToken": "tokens/TestToken.sol",
    "TrainingLedger": "TrainingLedger.sol",
}
FOLDERS = (".", "bench", "interfaces", "ledger", "tokens")
# Prague is what the chains of the profiles run; foundry.toml says the same.
SETTINGS: dict[str, Any] = {
    "evmVersion": "prague",
    "viaIR": True,
    "optimizer": {"enabled": True, "runs": 1000},
    "metadata": {"bytecodeHash": "none", "appendCBOR": False},
    "outputSelection": {"*": {"*": ["abi", "evm.bytecode.object", "evm.deployedBytecode.object"]}},
}
# EIP-170: a contract's code may not be longer.
CODE_BYTES_MAX = 24_576


def sources() -> dict[str, str]:
    """Read every source that may be part of an artifact, by its path under ``contracts/``."""
    source_paths = [
        path for folder in FOLDERS for path in sorted((CONTRACTS / folder).glob("*.sol"))
    ]
    return {str(path.relative_to(CONTRACTS)): path.read_text("utf-8") for path in source_paths}


def versions() -> dict[str, str]:
    """Say which compiler and library the lock file pins."""
    packages = json.loads((ROOT / "package-lock.json").read_bytes())["packages"]
    names = ("solc", "@openzeppelin/contracts")
    return {name: packages[f"node_modules/{name}"]["version"] for name in names}


def compiler_output(texts: dict[str, str]) -> dict[str, Any]:
    """Return solc's output for all sources, from the cache where nothing changed. About 20 s."""
    request = {
        "language": "Solidity",
        "sources": {name: {"content": text} for name, text in texts.items()},
        "settings": SETTINGS,
    }
    key = sha256(json.dumps([versions(), request], sort_keys=True).encode()).hexdigest()
    cached_output = CACHE / f"{key}.json"
    if cached_output.is_file():
        return dict(json.loads(cached_output.read_bytes()))
    compiler = CONTRACTS / "tools" / "solc"
    output = solcx.compile_standard(request, base_path=str(MODULES), solc_binary=str(compiler))
    CACHE.mkdir(parents=True, exist_ok=True)
    cached_output.write_text(json.dumps(output), encoding="utf-8")
    return dict(output)


def artifacts() -> dict[str, str]:
    """Return each artifact's text by its file's name.

    Raises:
        ValueError: a contract is longer than a chain accepts.
    """
    output = compiler_output(sources())["contracts"]
    texts = {}
    for name, source in PUBLISHED.items():
        contract = output[source][name]
        code = contract["evm"]["deployedBytecode"]["object"]
        if len(code) // 2 > CODE_BYTES_MAX:
            raise ValueError(
                f"{name} has {len(code) // 2} bytes of code, {CODE_BYTES_MAX} are allowed"
            )
        lines = [json.dumps(entry) for entry in contract["abi"]]
        abi = "[\n    " + ",\n    ".join(lines) + "\n  ]"
        bytecode = json.dumps("0x" + contract["evm"]["bytecode"]["object"])
        compiler = json.dumps(f"solc {versions()['solc']}, {SETTINGS['evmVersion']}, via IR")
        texts[f"{name}.json"] = (
            f'{{\n  "contractName": "{name}",\n  "compiler": {compiler},\n'
            f'  "abi": {abi},\n  "bytecode": {bytecode}\n}}\n'
        )
    return texts


def stale_artifacts() -> list[str]:
    """Name the committed artifacts that are not what the sources give."""
    texts = artifacts()
    stored_artifacts = {path.name: path.read_text("utf-8") for path in ARTIFACTS.glob("*.json")}
    return sorted(
        name
        for name in texts.keys() | stored_artifacts.keys()
        if texts.get(name) != stored_artifacts.get(name)
    )


def main() -> int:
    """Write the artifacts, or with ``--check`` say whether the committed ones are right."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        ARTIFACTS.mkdir(exist_ok=True)
        for name, text in artifacts().items():
            (ARTIFACTS / name).write_text(text, encoding="utf-8")
        return 0
    stale = stale_artifacts()
    if stale:
        print(
            f"Not what the sources give: {', '.join(stale)}. Fix: make contracts", file=sys.stderr
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
