"""What both ends of a call agree on beside the schemas."""
