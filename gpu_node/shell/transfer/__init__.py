"""Bulk between the coordinator and this disk: the cache, inputs of shards, downloads, uploads."""
