"""What gRPC calls reach: admission first, then translation, then the driver."""
