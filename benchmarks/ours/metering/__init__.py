"""Receipts and their settlement, driven without training."""
