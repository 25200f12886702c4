"""Messages between stages: their values, how these are packed, and the messages in flight."""
