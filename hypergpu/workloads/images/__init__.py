"""Image datasets, fetched with torchvision's own download code. Needs torch."""
