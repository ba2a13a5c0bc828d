"""What user, coordinator and node agree on of a farm job: items, bundles, results and units."""
