"""What travels between stages, how it is packed, and what has been sent and received."""
