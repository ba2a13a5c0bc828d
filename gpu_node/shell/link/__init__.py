"""The link to the coordinator: channels, calls, the control stream and its measurements."""
