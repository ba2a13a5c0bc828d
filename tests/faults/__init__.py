"""Patches that plant a fault in the product, each with the tests that have to find it."""
