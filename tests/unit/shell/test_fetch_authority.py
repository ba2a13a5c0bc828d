"""The look at a coordinator's CA, by a process that has many files open."""

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.wire.authority import fetch_authority

_SELECT_MOST = 1_024
"""select() takes no descriptor from here on."""


@pytest.fixture
def many_open_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * _SELECT_MOST), hard))
    descriptors = [os.open("/dev/null", os.O_RDONLY)]
    while descriptors[-1] < _SELECT_MOST:
        descriptors.append(os.dup(descriptors[0]))
    yield
    for each in descriptors:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_open_files")
def test_a_gateway_of_thousands_of_nodes_finds_out_that_a_coordinator_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(HyperGPUError, match="handshake took too long") as failure:
            fetch_authority(address, Digest(digest_of(b"a CA")), timeout_s=0.1)
    assert failure.value.reason is Reason.COORDINATOR_UNREACHABLE
