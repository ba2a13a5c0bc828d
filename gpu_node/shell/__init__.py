"""The daemon around the core: gRPC, files, processes and clocks."""
