"""Texts that the worker writes and judges, by the models of `farm` and the draws of `serving`."""
