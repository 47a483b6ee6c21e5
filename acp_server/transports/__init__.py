"""Transports: one module for each way in which a client reaches us."""
