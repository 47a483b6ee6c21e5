"""The messages of ACP v1 that we read and write, as msgspec Structs without behaviour.

What we read is strict about the fields we use and ignores all others. What we write leaves out
what is not set: some clients take an explicit null for a value.

Source: the published ACP v1 JSON schema.
"""

from __future__ import annotations

from acp_server.types.received import *
from acp_server.types.sent import *
