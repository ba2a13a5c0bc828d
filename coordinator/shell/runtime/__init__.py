"""Drives the machines: decides over events, persists them, and knows which nodes are there."""
