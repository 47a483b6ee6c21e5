"""A server on loopback that speaks what model providers speak, and judges what it is asked."""
