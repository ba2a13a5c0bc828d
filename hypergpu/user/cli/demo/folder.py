"""The folder that demos keep their things in, one demo after another."""

from pathlib import Path

from hypergpu.user.cluster.folder import RunFolder

SUMMARY_NAME = "summary.json"
PAGE_NAME = "page.html"
ACCOUNTS_NAME = "ledger.json"
"""The ledger of the demo's job, at the end, as `ledger show --json` prints it."""
BUCKETS_NAME = "buckets"
MODEL_NAME = "model"
LOGS_NAME = "logs"
CHAIN_NAME = "chain"
DATABASE_NAME = "postgresql"
UNDISTURBED_NAME = "undisturbed"
"""State and logs of the undisturbed job that `make demo FIXED=1 SCALE=1` compares with."""


def demo_folder(path: Path) -> RunFolder:
    """The folder, of which a demo removes what an earlier one left."""
    names = (BUCKETS_NAME, MODEL_NAME, LOGS_NAME, CHAIN_NAME, DATABASE_NAME, UNDISTURBED_NAME)
    leftovers = ("state", *names, SUMMARY_NAME, PAGE_NAME, ACCOUNTS_NAME)
    return RunFolder(path, ".hypergpu-demo", leftovers)
