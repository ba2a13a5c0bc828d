"""Receipts, epochs and the outbox: reading, keeping what was earned, writing what is sent."""
