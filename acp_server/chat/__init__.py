"""A small terminal client for any ACP agent, for a first look and for debugging."""
