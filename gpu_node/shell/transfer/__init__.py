"""Transfers of a shard: its model, its dataset and its update."""
