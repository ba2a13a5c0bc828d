"""What anybody checks without the coordinator: published receipts, and bundles of disputes."""
