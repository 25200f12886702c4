"""Helpers that all rooms share: options, files, tables, trees of tensors. They import no room."""
