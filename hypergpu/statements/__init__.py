"""Typed data (EIP-712) that nodes and coordinators sign about work."""
