"""Drives the cores of coordinator and nodes on virtual time: a world without processes."""
