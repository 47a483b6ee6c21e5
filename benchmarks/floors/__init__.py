"""The least an ACP agent can be in Python: what our own figures are held against."""
