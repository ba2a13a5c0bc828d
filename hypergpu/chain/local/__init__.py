"""Chains on this machine: Anvil as a process of its own, and one inside this process."""
