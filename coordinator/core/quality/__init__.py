"""How good accepted updates were: contributions, judging, the quality rule and its records."""
