"""Computes tasks in other processes of the operator: a pool on this machine, or Ray."""
