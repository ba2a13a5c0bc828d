"""Tasks of the coordinator that an engine computes, and folds that are cut into them."""
