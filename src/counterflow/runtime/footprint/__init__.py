"""Memory of a pipeline before its first step: steps of all workers on tensors whose memory nobody touches."""
