"""API of users' layers: carried states, attention, auxiliary losses, sums of losses."""
