"""What no order beats, and why."""
