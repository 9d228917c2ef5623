"""Numbers of things in reports, with the noun that goes with them."""

from __future__ import annotations

_HISSING = ("s", "x", "ch", "sh")


def counted(number: int, one: str, many: str | None = None, *, grouped: bool = False) -> str:
    """Return a number of things in words.

    Args:
        number: How many.
        one: What one of them is called.
        many: What several are called, if that is not `one` with an s.
        grouped: Whether thousands are set apart by commas.

    Example:
        >>> counted(1, "shard"), counted(2, "batch"), counted(0, "shard is", "shards are")
        ('1 shard', '2 batches', '0 shards are')
        >>> counted(1234567, "sample", grouped=True)
        '1,234,567 samples'
    """
    if many is None:
        many = one + ("es" if one.endswith(_HISSING) else "s")
    return f"{number:{',' if grouped else ''}} {one if number == 1 else many}"
