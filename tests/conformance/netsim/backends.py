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
from tests.programs import NEEDS


def can_tunnel() -> bool:
    """Whether tests of the tunnel run. CI must be able to, so there every one of them does."""
    return NEEDS["tunnel"].is_here() or bool(os.environ.get("CI"))


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
    claiming_backends = [
        backend for backend, backend_claims in _CLAIMS.items() if backend_claims >= set(claims)
    ]
    return pytest.mark.parametrize("backend", claiming_backends)
