"""A coordinator and nodes as processes of this machine: started, watched, ended together."""
