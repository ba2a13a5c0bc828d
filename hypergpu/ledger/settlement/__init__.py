"""An exact model of the contract's accounting, in plain integers.

It exists to be compared with the contract, call by call, and to be read: what the contract spreads
over storage slots and field widths stands here in a few lines. Nothing in it talks to a chain.
"""
