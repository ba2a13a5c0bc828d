"""Assignments of work, and the typed data (EIP-712) that is signed about it."""
