"""What a user's layers may import: carried states, attention, auxiliary losses, sums of losses."""
