from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acp_server.errors import INVALID_REQUEST, PARSE_ERROR
from acp_server.message import (
    BadMessage,
    Notification,
    Request,
    Response,
    error_of,
    parse,
    replace_surrogates,
)

DEEP = b"[" * 20_000 + b"]" * 20_000
any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def request(request_id: str, rest: str = "") -> bytes:
    return f'{{"jsonrpc":"2.0","id":{request_id},"method":"m"{rest}}}'.encode()


@pytest.mark.requirement("ACP-001")
def test_the_three_kinds_of_message_are_told_apart():
    asked = parse(b'{"jsonrpc":"2.0","id":1,"method":"m","params":{"a":1}}')
    noticed = parse(b'{"jsonrpc":"2.0","method":"m"}')
    answered = parse(b'{"jsonrpc":"2.0","id":1,"result":{"a":1}}')
    failed = parse(b'{"jsonrpc":"2.0","id":1,"error":{"code":5,"message":"no"}}')

    assert asked == Request(1, "m", b'{"a":1}')
    assert noticed == Notification("m", None)
    assert answered == Response(1, b'{"a":1}', None)
    assert failed == Response(1, None, b'{"code":5,"message":"no"}')


@pytest.mark.requirement("ACP-010", "B116")
@pytest.mark.parametrize(
    "request_id",
    [0, -1, 1, 2**53 + 1, -(2**63), 2**64, 2**70, "", "1", "é", "\u2028", None],
    ids=repr,
)
def test_an_id_keeps_its_value_and_its_type(request_id):
    message = parse(request(json.dumps(request_id)))

    assert isinstance(message, Request)
    assert message.id == request_id
    assert type(message.id) is type(request_id)


@pytest.mark.requirement("ACP-011")
@pytest.mark.parametrize("raw", ["1.5", "1.0", "1e2", "1e400", "true", "false", "{}", "[1]"])
def test_what_cannot_be_an_id_is_refused_without_one(raw):
    message = parse(request(raw))

    assert message == BadMessage(INVALID_REQUEST, "an id is an integer, a string or null")


@pytest.mark.parametrize("n_digits", [4300, 5000])
def test_an_id_of_thousands_of_digits_does_no_harm(n_digits):
    assert isinstance(parse(request("9" * n_digits)), Request | BadMessage)


@pytest.mark.requirement("ACP-012", "B117")
@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b'{"jsonrpc":"2.0",',
        b"[1,",
        b'"half',
        b"123abc",
        b"nope",
        b"\x00",
        b"{'a':1}",
        request("1") + b"\x00",
        request("1") + request("2"),
        request("1", ',"params":{"a":tru}'),
        request("1", ',"params":{"a":01}'),
        request("1", ',"params":{"a":"\t"}'),
        request("1", ',"params":{"a":"\\x"}'),
        b"Welcome to the machine!",
    ],
)
def test_what_is_not_json_is_a_parse_error_without_an_id(line):
    message = parse(line)

    assert isinstance(message, BadMessage)
    assert (message.code, message.id) == (PARSE_ERROR, None)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_constants_that_are_not_json_are_refused(constant):
    message = parse(request("1", f',"params":{{"a":{constant}}}'))

    assert isinstance(message, BadMessage)
    assert message.code == PARSE_ERROR


@pytest.mark.requirement("ACP-001")
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf"])
@pytest.mark.parametrize("where", ["method", "param", "unread member"])
def test_bytes_that_are_not_utf8_are_a_parse_error_wherever_they_are(bad, where):
    line = {
        "method": b'{"jsonrpc":"2.0","id":1,"method":"' + bad + b'"}',
        "param": b'{"jsonrpc":"2.0","id":1,"method":"m","params":{"a":"' + bad + b'"}}',
        "unread member": b'{"jsonrpc":"2.0","id":1,"method":"m","x":"' + bad + b'"}',
    }[where]

    assert parse(line) == BadMessage(PARSE_ERROR, "the message is not UTF-8")


@pytest.mark.requirement("ACP-013", "ACP-019")
@pytest.mark.parametrize(
    "line", [b"null", b"42", b'"x"', b"true", b"1.5", b"[]", b"[" + request("1") + b"]"]
)
def test_json_that_is_no_object_is_an_invalid_request_without_an_id(line):
    assert parse(line) == BadMessage(INVALID_REQUEST, "a message is a JSON object")


@pytest.mark.requirement("ACP-013", "B117")
@pytest.mark.parametrize(
    "line",
    [
        b'{"jsonrpc":"2.0","id":7,"method":5}',
        b'{"jsonrpc":"2.0","id":7,"method":null}',
        b'{"jsonrpc":"2.0","id":7}',
        b'{"jsonrpc":"1.0","id":7,"method":"m"}',
        b'{"jsonrpc":2.0,"id":7,"method":"m"}',
        b'{"id":7,"method":"m"}',
    ],
)
def test_the_id_of_a_bad_request_is_salvaged(line):
    message = parse(line)

    assert isinstance(message, BadMessage)
    assert (message.code, message.id) == (INVALID_REQUEST, 7)


@pytest.mark.parametrize(
    "line", [DEEP, request("1", ',"params":').removesuffix(b"}") + DEEP + b"}"]
)
def test_nesting_too_deep_to_read_is_a_parse_error(line):
    message = parse(line)

    assert isinstance(message, BadMessage)
    assert message.code == PARSE_ERROR


@pytest.mark.parametrize("line", [b"", b"  ", b"\r", b"\t \r", b"\xef\xbb\xbf"])
def test_a_blank_line_is_nothing(line):
    assert parse(line) is None


def test_a_byte_order_mark_a_carriage_return_and_spaces_are_tolerated():
    assert parse(b"\xef\xbb\xbf  " + request("1") + b" \r") == Request(1, "m", None)


def test_null_params_are_no_params():
    assert parse(request("1", ',"params":null')) == Request(1, "m", None)


def test_of_two_equal_keys_the_last_counts():
    assert parse(request("1", ',"id":2')) == Request(2, "m", None)


def test_an_escaped_lone_surrogate_becomes_the_replacement_character():
    message = parse(request(str(2**70), r',"params":{"\ud800":["a\udfff",1,null]}'))

    assert isinstance(message, Request)
    assert message.id == 2**70
    assert json.loads(message.params or b"") == {"�": ["a�", 1, None]}


def test_a_surrogate_pair_is_one_character():
    message = parse(request("1", r',"params":["\ud83d\ude00"]'))

    assert isinstance(message, Request)
    assert json.loads(message.params or b"") == ["😀"]


def test_surrogates_are_replaced_in_keys_lists_and_tuples():
    assert replace_surrogates({"\ud800": ("\udc00", ["ok", "\ud83d\ude00"])}) == {
        "�": ["�", ["ok", "😀"]]
    }


@given(any_json)
def test_params_pass_untouched(value):
    raw = json.dumps(value, ensure_ascii=False).encode()
    message = parse(b'{"jsonrpc":"2.0","id":1,"method":"m","params":' + raw + b"}")

    assert message == Request(1, "m", None if value is None else raw)


@given(st.binary(max_size=300))
def test_no_line_whatsoever_raises(line):
    parse(line)


@pytest.mark.requirement("ACP-016")
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (b'{"code":-32800,"message":"gone"}', (-32800, "gone", "")),
        (b'{"code":1,"message":"m","data":{"reason":"why"}}', (1, "m", "why")),
        (b'{"code":1,"message":"m","data":{"reason":5}}', (1, "m", "")),
        (b'{"code":"many","message":[]}', (0, "malformed error", "")),
        (b"5", (0, "malformed error", "")),
        (None, (0, "", "")),
    ],
)
def test_an_error_is_read_whatever_its_shape(error, expected):
    assert error_of(Response(1, None, error)) == expected
