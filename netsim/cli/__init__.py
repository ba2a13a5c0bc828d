"""`hypergpu netsim`: profiles, check, shape, run, plot."""
