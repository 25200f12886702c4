"""Tools with which schemes make orders: slots, filled waits, and split backwards."""
