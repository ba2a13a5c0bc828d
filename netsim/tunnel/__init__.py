"""Real packets through network namespaces and a user-space router: root and TUN, any kernel."""
