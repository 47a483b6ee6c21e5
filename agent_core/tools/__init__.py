"""Tools. `tool` is the seam, `pipeline` runs a call through policy; one module for each tool."""
