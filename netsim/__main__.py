"""`python -m netsim`, which `hypergpu netsim` starts."""

import sys

from netsim.commands.app import app

SEPARATOR = "--"


def main() -> None:
    """Run the command line. What follows `--` is another program's and is not parsed."""
    arguments = sys.argv[1:]
    command: list[str] = []
    if SEPARATOR in arguments:
        at = arguments.index(SEPARATOR)
        arguments, command = arguments[:at], arguments[at + 1 :]
    app(args=arguments, prog_name="hypergpu netsim", obj=command)


if __name__ == "__main__":
    main()
