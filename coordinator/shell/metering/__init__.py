"""Receipts: whose word they are, how they are kept, and how nodes get theirs."""
