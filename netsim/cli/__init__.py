"""`hypergpu netsim`: the commands profiles, check, shape, run, sweep, plot and compare."""
