"""NodeService: what nodes say."""
