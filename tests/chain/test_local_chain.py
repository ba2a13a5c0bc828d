"""The local chain that outlives coordinators, as a program."""

import signal
import socket
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from hypergpu.command_line import program
from payments.shell.local_chain import LocalChainLine


def test_it_says_where_it_listens_and_ends_with_its_anvil(tmp_path: Path) -> None:
    command = program("payments.shell.local_chain", str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        line = msgspec.json.decode(child.stdout.readline(), type=LocalChainLine)
        place = ("127.0.0.1", urlsplit(line.url).port or 0)
        socket.create_connection(place).close()
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place)
