"""Receipts, rewards and settlement of jobs: an optional plugin of the coordinator."""
