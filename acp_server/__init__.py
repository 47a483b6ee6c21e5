"""The ACP front end of acp-agent: it turns bytes into agent calls and back."""

__version__ = "0.1.0"
