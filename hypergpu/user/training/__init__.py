"""A model of one's own, trained from a script or notebook: `train`, and the `Run` it returns."""
