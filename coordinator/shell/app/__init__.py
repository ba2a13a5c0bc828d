"""Wiring of the process: opens everything, serves both listeners, hosts payments, reports."""
