"""Decisions for the coordinator and its gateways as a whole, beyond any single job."""
