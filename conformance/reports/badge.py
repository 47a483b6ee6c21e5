"""A badge: the JSON that shields.io's endpoint badges are made of."""

from __future__ import annotations

import msgspec

from conformance.verdicts import Report

__all__ = ["to_badge"]


def to_badge(report: Report) -> bytes:
    """Return the badge's JSON."""
    ratio = f"{report.n_exercised}/{report.n_applicable} exercised"
    if not report.is_judged:
        message, colour = "could not judge", "lightgrey"
    elif report.is_conformant:
        message, colour = f"conformant, {ratio}", "brightgreen"
    else:
        message, colour = f"not conformant, {ratio}", "red"
    badge = {"schemaVersion": 1, "label": "ACP", "message": message, "color": colour}
    return msgspec.json.encode(badge) + b"\n"
