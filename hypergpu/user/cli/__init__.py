"""`hypergpu`: the user's command. It talks gRPC and starts programs, importing none."""
