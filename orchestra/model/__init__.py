"""The decoder-only transformer, on one device. It knows no mesh, no rank and no training loop."""
