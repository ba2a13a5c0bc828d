"""Leaves out what a developer's machine cannot run; CI leaves out nothing."""

import os

from tests.conformance.netsim.backends import can_tunnel

collect_ignore = [] if can_tunnel() else ["test_tunnel_lifecycle.py"]
if os.geteuid() != 0 and not os.environ.get("CI"):
    collect_ignore += ["test_namespace_networks.py", "test_traffic_control.py"]
