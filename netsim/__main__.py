"""`python -m netsim`, which `hypergpu netsim` starts."""

import sys

from hypergpu.errors import HyperGPUError
from hypergpu.terminal.failure import report, usage_error
from hypergpu.terminal.streams import prepare_streams
from netsim.cli.app import app

SEPARATOR = "--"
TAKES_A_COMMAND = "shape"


def main() -> None:
    """Run the command line. What follows `--` is another program's and is not parsed."""
    arguments = sys.argv[1:]
    command: list[str] = []
    if SEPARATOR in arguments:
        at = arguments.index(SEPARATOR)
        arguments, command = arguments[:at], arguments[at + 1 :]
        if arguments[:1] != [TAKES_A_COMMAND] or not command:
            detail = f"{SEPARATOR} is for the command of {TAKES_A_COMMAND}"
            fix = f"hypergpu netsim {TAKES_A_COMMAND} PROFILE... {SEPARATOR} COMMAND"
            sys.exit(report(usage_error(detail, fix)))
    try:
        prepare_streams()
        app(args=arguments, prog_name="hypergpu netsim", obj=command)
    except HyperGPUError as failure:
        sys.exit(report(failure))


if __name__ == "__main__":
    main()
