"""Readings of nodes' links and speeds, and the echo of their probe datagrams."""
