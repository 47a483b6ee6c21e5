"""The agent: turns, tools, sessions, models. Knows nothing of JSON-RPC or ACP."""
