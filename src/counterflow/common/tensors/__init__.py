"""Helpers for tensors that know no room: devices, DTensors, graphs, and torch's private names."""
