"""The tables of a config: one record per table, with every key's type, default, meaning and legal values."""
