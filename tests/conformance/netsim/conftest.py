"""Leaves out what a developer's machine cannot run; CI leaves out nothing."""

from tests.conformance.netsim.backends import can_tunnel

collect_ignore = [] if can_tunnel() else ["test_tunnel_lifecycle.py"]
