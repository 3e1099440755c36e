"""``table_4`` and ``table_5``, measured and as formulas."""
