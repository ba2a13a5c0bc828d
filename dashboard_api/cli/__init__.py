"""`hypergpu dashboard`: the page for a coordinator on any machine."""
