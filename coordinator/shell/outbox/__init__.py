"""Sends receipts and events of rounds to programs of others, at least once."""
