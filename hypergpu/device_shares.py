"""Shares of a device, in thousandths: what a node has of it, and what a job needs."""

WHOLE_DEVICE_PERMILLE = 1_000
LEAST_SHARE_PERMILLE = 62
"""A sixteenth, which is the least that a device is divided into, rounded down."""
