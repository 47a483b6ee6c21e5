"""``python -m acp_server``."""

from __future__ import annotations

import sys

from acp_server.cli import main

sys.exit(main())
