"""`hypergpu netsim`: the commands profiles, check, shape, run and plot."""
