"""The link to the coordinator: joining, certificates, the control stream and bulk calls."""
