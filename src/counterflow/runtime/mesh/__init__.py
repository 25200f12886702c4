"""Further dimensions of the device mesh: weights of a stage sharded by FSDP2 or tensor parallelism."""
