"""Decisions of a gateway: what of a node's messages goes on, and when nodes may dial."""
