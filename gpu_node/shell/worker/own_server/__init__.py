"""A worker that passes calls on to a server that the node's owner runs: no job's code is in it."""
