"""Receipts on their way to a chain, measured: processes that are killed, chains that reorganise."""
