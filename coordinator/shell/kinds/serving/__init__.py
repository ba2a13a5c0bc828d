"""Served models in this process: nodes hold them, and calls are routed to nodes."""
