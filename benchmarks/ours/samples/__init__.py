"""Samples to a held-out loss, all nodes in one process."""
