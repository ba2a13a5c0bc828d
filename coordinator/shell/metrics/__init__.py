"""Figures for Prometheus, of a coordinator and of a gateway."""
