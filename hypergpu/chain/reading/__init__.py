"""Asking a ledger: how it stands at one block, and what became of a job on it."""
