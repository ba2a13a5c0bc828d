"""What commands do: the long ones run as tasks whose answers enter the driver's inbox."""
