"""Under the services: raw bytes, refusals, versions."""
