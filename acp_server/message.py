"""One line to one JSON-RPC message, without I/O. Says precisely what is wrong with a bad one.

What ACP leaves open is decided here: arrays are refused (ACP has no batches), ids are integers of
any size, strings or null, and are echoed byte for byte; the id of a bad request is salvaged where
it can be read; escaped lone surrogates become U+FFFD; NaN and Infinity are not JSON.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from acp_server.errors import INVALID_REQUEST, PARSE_ERROR
from agent_core.text import replace_surrogates

__all__ = [
    "BadMessage",
    "Message",
    "Notification",
    "Request",
    "RequestId",
    "Response",
    "error_of",
    "parse",
]

RequestId = int | str | None
"""As JSON-RPC has it. Compare with `id_key`: in Python ``1 == True`` and ``1 == 1.0``."""


class Request(Struct, frozen=True):
    """A request. `params` is undecoded JSON, or `None` where there are none."""

    id: RequestId
    method: str
    params: bytes | None


class Notification(Struct, frozen=True):
    """A notification."""

    method: str
    params: bytes | None


class Response(Struct, frozen=True):
    """An answer to a request of ours: `result` is undecoded JSON, or `error` is set."""

    id: RequestId
    result: bytes | None
    error: bytes | None


class BadMessage(Struct, frozen=True):
    """Something that is answered with an error. `id` is `None` where none could be read."""

    code: int
    reason: str
    id: RequestId = None


Message = Request | Notification | Response | BadMessage


class _Envelope(Struct):
    jsonrpc: Raw | UnsetType = UNSET
    id: Raw | UnsetType = UNSET
    method: Raw | UnsetType = UNSET
    params: Raw | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class _Error(Struct):
    code: int = 0
    message: str = ""
    data: Any = None


_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_decode_any = msgspec.json.Decoder().decode


def parse(line: bytes) -> Message | None:
    """Return the message on `line`, or `None` for a blank line.

    Args:
        line: Without its newline. A byte order mark and a carriage return are tolerated.
    """
    line = line.removeprefix(b"\xef\xbb\xbf").strip()
    if not line:
        return None
    try:
        line.decode()
    except UnicodeDecodeError:
        return BadMessage(PARSE_ERROR, "the message is not UTF-8")
    try:
        return _classify(_decode_envelope(line))
    except (msgspec.DecodeError, RecursionError):
        return _parse_slowly(line)


def error_of(response: Response) -> tuple[int, str, str]:
    """Return code, message and, if it says so, reason of an error response of any shape."""
    try:
        error = msgspec.json.decode(response.error or b"{}", type=_Error)
    except msgspec.MsgspecError:
        return 0, "malformed error", ""
    reason = error.data.get("reason") if isinstance(error.data, dict) else None
    return error.code, error.message, reason if isinstance(reason, str) else ""


def _classify(envelope: _Envelope) -> Message:
    request_id: RequestId = None
    if envelope.id is not UNSET:
        try:
            request_id = _request_id(bytes(envelope.id))
        except ValueError:
            return BadMessage(INVALID_REQUEST, "an id is an integer, a string or null")
    has_id = envelope.id is not UNSET
    if envelope.jsonrpc is UNSET or bytes(envelope.jsonrpc) != b'"2.0"':
        return BadMessage(INVALID_REQUEST, 'jsonrpc must be "2.0"', request_id)
    if envelope.method is UNSET:
        if has_id and (envelope.result is not UNSET or envelope.error is not UNSET):
            return Response(request_id, _bytes(envelope.result), _bytes(envelope.error))
        return BadMessage(INVALID_REQUEST, "a message has a method or a result", request_id)
    method = _decode_any(envelope.method)
    if not isinstance(method, str):
        return BadMessage(INVALID_REQUEST, "method must be a string", request_id)
    if has_id:
        return Request(request_id, method, _bytes(envelope.params))
    return Notification(method, _bytes(envelope.params))


def _request_id(raw: bytes) -> RequestId:
    value = _decode_any(raw)
    if value is None or type(value) in (int, str):
        result: RequestId = value
        return result
    raise ValueError("not an id")


def _bytes(raw: Raw | UnsetType) -> bytes | None:
    if raw is UNSET or bytes(raw) == b"null":
        return None
    return bytes(raw)


def _parse_slowly(line: bytes) -> Message:
    """Decode again with the standard library, which takes escaped lone surrogates and any value."""
    import json  # rarely needed, and never by the handshake

    try:
        value = json.loads(line, parse_constant=_refuse_constant)
        clean = msgspec.json.encode(replace_surrogates(value))
        return _classify(_decode_envelope(clean))
    except msgspec.ValidationError:
        return BadMessage(INVALID_REQUEST, "a message is a JSON object")
    except (ValueError, RecursionError):
        return BadMessage(PARSE_ERROR, "the message is not JSON")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
