"""Served models: which nodes hold one, and which of them answers a call."""
