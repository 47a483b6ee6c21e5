"""Session logs: `log` in memory, `store` the seam to where they are kept, one module per store."""
