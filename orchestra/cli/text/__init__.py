"""Text that several commands print: figures, tables, progress, run names."""
