"""From a checked configuration to something a launcher can start. It starts nothing and imports no torch."""
