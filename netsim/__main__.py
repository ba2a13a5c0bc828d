"""`python -m netsim`: the same commands as `hypergpu netsim`."""

import sys

from hypergpu.errors import HyperGPUError
from hypergpu.stdio import prepare_streams
from hypergpu.user.terminal.commands import report_error
from netsim.cli.app import app

if __name__ == "__main__":
    try:
        prepare_streams()
    except HyperGPUError as failure:
        sys.exit(report_error(failure))
    app(prog_name="hypergpu netsim")
