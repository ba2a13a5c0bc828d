"""`hypergpu demo`: a coordinator and real nodes on this machine, one of which is killed."""
