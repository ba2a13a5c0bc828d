"""`python -m payments.shell.local_chain FOLDER`: an Anvil that outlives coordinators.

It prints a line once it listens and ends with SIGTERM, or with whoever started it.
"""

import signal
import sys
from pathlib import Path

import msgspec

from hypergpu.errors import HyperGPUError
from hypergpu.stdio import prepare_streams
from payments.shell.anvil import AnvilOptions, running_anvil


class LocalChainLine(msgspec.Struct, frozen=True):
    """The one line on standard output."""

    url: str
    """Address of its RPC."""


def main() -> int:
    """Keep a chain until told to end; returns the exit status."""
    prepare_streams()
    signals = {signal.SIGTERM, signal.SIGINT}
    try:
        with running_anvil(AnvilOptions(), log_file=Path(sys.argv[1]) / "anvil.log") as anvil:
            # Not before: a child would block them, too.
            signal.pthread_sigmask(signal.SIG_BLOCK, signals)
            _say(LocalChainLine(anvil.url))
            signal.sigwait(signals)
    except HyperGPUError as error:
        _say({"refused": error.reason.name, "detail": error.detail, "fix": error.fix})
        return error.reason.exit_code
    return 0


def _say(line: object) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
