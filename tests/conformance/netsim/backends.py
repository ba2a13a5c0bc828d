"""The backends that one suite measures: each test runs for every backend that claims its subject.

The machine may be busy. A backend says itself whether it kept its times (``verdict``); the tests
assert what must hold even when it did not, and more when it did.
"""

import os

import pytest

from netsim.link import NetsimError
from netsim.measure.probe import BackendClaim
from netsim.network.backends import BACKENDS
from netsim.network.options import Backend
from netsim.tunnel.tunnel import require_tunnel


def can_tunnel() -> bool:
    """Whether this machine can build a tunnel. CI must, so there every test of it runs."""
    try:
        require_tunnel()
    except NetsimError:
        return bool(os.environ.get("CI"))
    return True


def _claims(backend: Backend) -> frozenset[BackendClaim]:
    if backend is Backend.TUNNEL and not can_tunnel():
        return frozenset()
    try:
        return BACKENDS[backend].claims()
    except NetsimError:
        return frozenset()


_CLAIMS = {backend: _claims(backend) for backend in Backend}


def for_each(*claims: BackendClaim) -> pytest.MarkDecorator:
    """Run a test for the backends that claim all of these."""
    claiming = [backend for backend, found in _CLAIMS.items() if found >= set(claims)]
    return pytest.mark.parametrize("backend", claiming)
