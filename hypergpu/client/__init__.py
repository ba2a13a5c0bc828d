"""The coordinator as programs see it: JobService and OperatorService without protobuf."""
