"""Tables of SQL databases."""
