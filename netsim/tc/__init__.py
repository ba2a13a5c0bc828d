"""Real packets through the kernel's own queues (netem, tbf): root and a kernel that has them."""
