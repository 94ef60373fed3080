"""The typed contract: words that cross a process border, and nothing that needs I/O."""
