"""What the coordinator keeps of nodes' lines and speeds, and the datagrams it sends back."""
