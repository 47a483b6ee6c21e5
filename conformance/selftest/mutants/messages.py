"""Mutants that break lines, messages, or errors."""

from __future__ import annotations

from typing import Final

from conformance.selftest.mutants.mutant import Mutant, mutant

__all__ = ["MUTANTS"]

MUTANTS: Final[tuple[Mutant, ...]] = (
    # --- lines ----------------------------------------------------------------------------------
    mutant(
        "banner",
        "It greets on stdout before the first message.",
        "framing stdout",
        (
            "rpc",
            "        self._out = os.dup(1)\n",
            '        self._out = os.dup(1)\n        os.write(self._out, b"Self-test agent 1.0\\n")\n',
        ),
    ),
    mutant(
        "prints-in-turns",
        "It prints a log line on stdout when a turn begins.",
        "framing stdout",
        (
            "session",
            '        self._message_kind = ""\n        if not any(',
            '        self._message_kind = ""\n'
            '        self.connection._outbox += b"INFO turn started\\n"\n        if not any(',
        ),
    ),
    mutant(
        "pretty-json",
        "Its messages go over several lines.",
        "framing",
        ("rpc", 'separators=(",", ":"))', "indent=1)"),
    ),
    mutant(
        "sends-batches",
        "It wraps its notifications in an array.",
        "framing jsonrpc batch",
        (
            "rpc",
            'self.send({"jsonrpc": "2.0", "method": method, "params": params})\n\n    def request',
            'line = json.dumps([{"jsonrpc": "2.0", "method": method, "params": params}])\n'
            '        self._outbox += line.encode() + b"\\n"\n        self._write()\n\n'
            "    def request",
        ),
    ),
    mutant(
        "latin-1",
        "It writes Latin-1 instead of UTF-8.",
        "framing utf-8",
        ("rpc", 'line.encode("utf-8", "replace")', 'line.encode("latin-1", "replace")'),
    ),
    mutant(
        "emits-infinity",
        "The cost in its usage is Infinity, which is no JSON.",
        "framing strict-json",
        ("rpc", "allow_nan=False", "allow_nan=True"),
        ("session", "round(used * DOLLARS_PER_TOKEN, 6)", 'float("inf")'),
    ),
    mutant(
        "drops-when-slow",
        "It drops messages while the client does not read.",
        "framing slow-reader",
        (
            "rpc",
            '        self._outbox += line.encode("utf-8", "replace")',
            "        if len(self._outbox) > 65536:\n            return\n"
            '        self._outbox += line.encode("utf-8", "replace")',
        ),
        ("rpc", "OUTBOX_BYTES: Final = 256 * 1024", "OUTBOX_BYTES: Final = 1024 * 1024"),
    ),
    mutant(
        "dies-on-bad-json",
        "A line that is no JSON ends it.",
        "robustness malformed-json",
        ("rpc", 'raise RpcError(PARSE_ERROR, "the line is no JSON") from None', "raise"),
    ),
    mutant(
        "silent-on-bad-json",
        "It does not answer a line that is no JSON.",
        "errors malformed-json",
        (
            "rpc",
            "        except RpcError as error:\n            self.send",
            "        except RpcError as error:\n            if error.code == PARSE_ERROR:\n"
            "                return\n            self.send",
        ),
    ),
    mutant(
        "dies-on-deep-json",
        "Deep nesting ends it.",
        "robustness deep-json",
        ("rpc", "except (ValueError, RecursionError):", "except ValueError:"),
    ),
    mutant(
        "dies-on-long-lines",
        "A line of more than 64 KiB ends it.",
        "robustness long-line",
        ("rpc", "LINE_LIMIT_BYTES: Final = 64 * 1024 * 1024", "LINE_LIMIT_BYTES: Final = 65536"),
        (
            "rpc",
            'raise RpcError(INVALID_REQUEST, "the message is too long")',
            "raise SystemExit(1)",
        ),
    ),
    mutant(
        "loses-long-lines",
        "It drops lines of more than 64 KiB.",
        "robustness long-line",
        ("rpc", "LINE_LIMIT_BYTES: Final = 64 * 1024 * 1024", "LINE_LIMIT_BYTES: Final = 65536"),
        ("rpc", 'raise RpcError(INVALID_REQUEST, "the message is too long")', "return"),
    ),
    mutant(
        "breaks-split-characters",
        "It decodes what it reads piece by piece, and so a character that is cut.",
        "robustness fragments utf-8",
        (
            "rpc",
            "chunk = os.read(0, READ_BYTES)",
            'chunk = os.read(0, READ_BYTES).decode("utf-8", "replace").encode()',
        ),
    ),
    mutant(
        "one-line-a-read",
        "It takes one message from each read and drops the rest.",
        "FRM-06 robustness coalesced-writes",
        ("rpc", "        for line in lines:\n", "        for line in lines[:1]:\n"),
    ),
    mutant(
        "dies-on-batch",
        "An array ends it.",
        "robustness batch",
        (
            "rpc",
            "        if not isinstance(message, dict):\n",
            "        if isinstance(message, list):\n            raise SystemExit(1)\n"
            "        if not isinstance(message, dict):\n",
        ),
    ),
    mutant(
        "silent-on-batch",
        "It does not answer an array.",
        "errors batch",
        (
            "rpc",
            "        if not isinstance(message, dict):\n",
            "        if isinstance(message, list):\n            return None\n"
            "        if not isinstance(message, dict):\n",
        ),
    ),
    mutant(
        "answers-blank-lines",
        "It answers an empty line with an error.",
        "robustness blank-lines",
        ("rpc", "            if line:\n", "            if line is not None:\n"),
    ),
    mutant(
        "refuses-crlf",
        "A line that ends in CR LF is no JSON to it.",
        "robustness crlf",
        (
            "rpc",
            '            line = line.removeprefix(b"\\xef\\xbb\\xbf").strip()\n',
            '            if line.endswith(b"\\r"):\n'
            '                raise RpcError(PARSE_ERROR, "the line is no JSON")\n',
        ),
    ),
    # --- messages -------------------------------------------------------------------------------
    mutant(
        "no-jsonrpc-member",
        "Its responses do not say that they are JSON-RPC 2.0.",
        "jsonrpc",
        (
            "rpc",
            'self._connection.send({"jsonrpc": "2.0", "id": self.key[1], **body})',
            'self._connection.send({"id": self.key[1], **body})',
        ),
    ),
    mutant(
        "string-ids",
        "It turns the ids of requests into strings.",
        "jsonrpc ids",
        ("rpc", '"id": self.key[1], **body', '"id": str(self.key[1]), **body'),
    ),
    mutant(
        "rounds-ids",
        "Big ids come back rounded.",
        "jsonrpc ids",
        (
            "rpc",
            "        self._connection.inflight.pop(self.key, None)\n",
            "        self._connection.inflight.pop(self.key, None)\n"
            "        key = self.key[1]\n"
            "        key = int(float(key)) if type(key) is int else key\n",
        ),
        ("rpc", '"id": self.key[1], **body', '"id": key, **body'),
    ),
    mutant(
        "result-and-error",
        "Its error responses have a result, too.",
        "jsonrpc",
        (
            "rpc",
            '{"error": error.body()})\n\n    def _settle',
            '{"result": {}, "error": error.body()})\n\n    def _settle',
        ),
    ),
    mutant(
        "null-results",
        "Where there is nothing to say, its result is null rather than an object.",
        "schema jsonrpc",
        ("rpc", 'self._settle({"result": result})', 'self._settle({"result": result or None})'),
    ),
    mutant(
        "answers-notifications",
        "It answers notifications.",
        "jsonrpc notifications",
        (
            "rpc",
            "            return self._on_notification(method, params)\n",
            "            self._on_notification(method, params)\n"
            '            return self.send({"jsonrpc": "2.0", "id": None, "result": {}})\n',
        ),
    ),
    mutant(
        "answers-responses",
        "It answers a response that it did not wait for.",
        "jsonrpc stray-response",
        (
            "rpc",
            "            return  # an answer that we wait for no more, or never did\n",
            '            raise RpcError(INVALID_REQUEST, "nobody asked")\n',
        ),
    ),
    mutant(
        "dies-on-stray-responses",
        "A response that it did not wait for ends it.",
        "robustness stray-response",
        (
            "rpc",
            "self._pending.pop(key, None) if type(key) is int else None",
            "self._pending.pop(key)  # type: ignore",
        ),
    ),
    mutant(
        "answers-twice",
        "It answers each request twice.",
        "jsonrpc answered-once",
        (
            "rpc",
            "        self.is_answered = True\n",
            '        self.is_answered = "result" not in body\n',
        ),
        (
            "session",
            '            turn.request.answer({"stopReason": reason})\n',
            '            turn.request.answer({"stopReason": reason})\n            turn.request.answer({"stopReason": reason})\n',
        ),
    ),
    mutant(
        "reuses-request-ids",
        "All its own requests have the same id.",
        "jsonrpc ids",
        ("rpc", "        self._last_id += 1\n", "        self._last_id = 1\n"),
    ),
    # --- errors ---------------------------------------------------------------------------------
    mutant(
        "silent-on-unknown-methods",
        "It does not answer a method that it does not know.",
        "FRM-19 errors unknown-method",
        (
            "methods",
            '                raise RpcError(METHOD_NOT_FOUND, "there is no such method")\n',
            "                return None\n",
        ),
    ),
    mutant(
        "takes-unknown-methods",
        "It answers a method that it does not know with an empty result.",
        "errors unknown-method",
        (
            "methods",
            '                raise RpcError(METHOD_NOT_FOUND, "there is no such method")\n',
            "                return request.answer({})\n",
        ),
    ),
    mutant(
        "unknown-method-is-internal",
        "The code for a method that it does not know is that of an internal error.",
        "errors unknown-method codes",
        (
            "methods",
            'raise RpcError(METHOD_NOT_FOUND, "there',
            'raise RpcError(INTERNAL_ERROR, "there',
        ),
    ),
    mutant(
        "bad-params-are-internal",
        "The code for wrong params is that of an internal error.",
        "errors codes",
        ("rpc", "INVALID_PARAMS: Final = -32602", "INVALID_PARAMS: Final = -32603"),
    ),
    mutant(
        "string-codes",
        "Its error codes are strings.",
        "errors jsonrpc",
        ("rpc", '{"code": self.code, "message"', '{"code": str(self.code), "message"'),
    ),
    mutant(
        "traceback-in-errors",
        "Its errors show a traceback with its own paths.",
        "errors security one-sentence",
        (
            "methods",
            '            raise RpcError(NOT_FOUND, "there is no such session", '
            '{"sessionId": session_id})\n        return session\n',
            "            raise RpcError(NOT_FOUND, 'Traceback (most recent call last):\\n  File \"' "
            '+ __file__ + \'", line 1, in _session\\nKeyError\', {"sessionId": session_id})\n'
            "        return session\n",
        ),
    ),
    mutant(
        "exits-after-errors",
        "It ends after it answered with an error.",
        "robustness errors",
        (
            "rpc",
            '        self._settle({"error": error.body()})\n',
            '        self._settle({"error": error.body()})\n'
            "        self._connection._loop.soon(self._connection.end)\n",
        ),
    ),
    mutant(
        "numbers-for-digits",
        "An id that is a string of digits comes back as a number.",
        "FRM-16 jsonrpc ids",
        (
            "rpc",
            '"id": self.key[1], **body',
            '"id": int(str(self.key[1])) if str(self.key[1]).isdigit() else self.key[1], **body',
        ),
    ),
    mutant(
        "silent-on-custom-methods",
        "It does not answer a method that begins with an underscore.",
        "FRM-20 errors unknown-method extensions",
        (
            "methods",
            "            if method is None:\n",
            '            if request.method.startswith("_"):\n                return None\n'
            "            if method is None:\n",
        ),
    ),
    mutant(
        "few-at-a-time",
        "It drops requests while eight others are not answered.",
        "FRM-23 jsonrpc answered-once",
        (
            "rpc",
            "        self.inflight[request.key] = request\n",
            "        if len(self.inflight) >= 8:\n            return None\n"
            "        self.inflight[request.key] = request\n",
        ),
        (
            "rpc",
            "        self._on_request(request)\n",
            "        self._loop.soon(lambda: self._on_request(request))\n",
        ),
    ),
)
