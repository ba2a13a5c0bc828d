"""How far the pay of each node is: promised, recorded, paid, final."""
