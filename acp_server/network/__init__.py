"""Clients that are elsewhere: WebSocket and Streamable HTTP. Nothing here is loaded for stdio."""
