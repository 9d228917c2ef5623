"""JSON parts are what `json.loads` makes of them, whoever parses them."""

from __future__ import annotations

import json
import sys
from random import Random

import pytest

from energon.decode import values

TEXTS = [
    *(b"NaN", b"-Infinity", b"1e400", b"-0", b"-0.0", b"1E5", b"1.0", b"01", b"1.", b".5", b"+1"),
    *(b"123456789012345678901234567890", b"-9223372036854775809", b"18446744073709551616"),
    *(b"9007199254740993.0", b"2.2250738585072011e-308", b"5e-324", b"2e-324", b"1" * 5000),
    *(b'{"a":1,"b":2,"a":3}', b'{"\\u0061":1,"a":2}', b'{"":0}', b"{1:2}", b'{"a":1,}', b"[1,]"),
    *(
        b'"\\ud800"',
        b'"\\ud83d\\ude00"',
        b'"\\ude00\\ud83d"',
        b'"\xed\xa0\x80"',
        b'"\xf0\x9f\x98\x80"',
    ),
    *(b'"\x01"', b'"\x7f"', b'"\xff"', b'"\t"', b'"\\x"', b'"\\u0000"', b'"\\/"'),
    *(b"\xef\xbb\xbf1", b" [1 , 2]\n", b"[1]\x00", b"[1] x", b"\x0c1", b"\xc2\xa01", b"", b"tru"),
    *('{"a": "é"}'.encode(encoding) for encoding in ("utf-16", "utf-16-be", "utf-32-le")),
]


def outcome(parse, data):
    try:
        return repr(parse(data))
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("package", ["msgspec", None])
def test_values_and_errors_are_those_of_the_standard_library(monkeypatch, package):
    if package is None:
        monkeypatch.setitem(sys.modules, "msgspec", None)
    else:
        pytest.importorskip(package, reason="the extra fast-json is not installed")
    values.json_parser.cache_clear()
    try:
        random = Random(0)
        whole = json.dumps({"id": 1, "s": "aé\n", "l": [1.5, None, True, {"x": -3e-7}]}).encode()
        texts = list(TEXTS)
        for _ in range(3000):
            damaged = bytearray(whole)
            place = random.randrange(len(damaged))
            damaged[place : place + random.randint(0, 1)] = bytes(
                random.choices(b'"\\{}[],:0e.+- \n\xff')
            )
            texts.append(bytes(damaged))
        for text in texts:
            expected = outcome(json.loads, text)
            assert outcome(values.decode_json, text) == expected, text
    finally:
        values.json_parser.cache_clear()
