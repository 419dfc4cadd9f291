"""The decoder-only transformer, on one device."""
