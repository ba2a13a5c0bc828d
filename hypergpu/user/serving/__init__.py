"""Models that a user has served: how one is started, and the API that everybody's tools speak."""
