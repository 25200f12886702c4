"""What schemes make orders with: slots, filled waits, and backwards split in two."""
