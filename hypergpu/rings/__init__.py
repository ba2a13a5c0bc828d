"""Rings: a model whose layers several nodes hold, one run of layers each."""
