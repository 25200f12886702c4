"""Further dimensions of the device mesh: stages whose own weights are sharded, by FSDP2 or tensor parallelism."""
