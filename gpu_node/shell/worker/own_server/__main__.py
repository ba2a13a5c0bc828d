"""`python -m gpu_node.shell.worker.own_server`: the worker of leases that the owner's server
answers.

It is no sandbox, as it has to reach that server: it runs no code and loads no file of a job.
"""

import os
import sys

import msgspec

from gpu_node.core.own_server import OwnServer
from gpu_node.shell.worker.__main__ import serve
from gpu_node.shell.worker.own_server.launch import VARIABLE
from gpu_node.shell.worker.own_server.performer import server_performer
from gpu_node.shell.worker.performers import Performer, Performers
from hypergpu.serving.serve_request import ENGINE_VERSION, SERVER_KIND


def main() -> int:
    """Serve the daemon until its pipe closes."""
    server = msgspec.json.decode(os.environ.pop(VARIABLE), type=OwnServer)
    performer = Performer(SERVER_KIND, ENGINE_VERSION, lambda: server_performer(server))
    return serve(performers=Performers(performer))


if __name__ == "__main__":
    STATUS = main()
    sys.stderr.flush()
    # The listening thread may wait in a read, and the interpreter would abort over its lock.
    os._exit(STATUS)
