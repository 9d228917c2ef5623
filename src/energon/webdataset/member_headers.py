"""Owner, permissions and time in the headers of tar members."""

from __future__ import annotations

from energon.errors import ConfigError

_MODE, _MTIME = slice(100, 108), slice(136, 148)
_USER, _GROUP = slice(265, 297), slice(297, 329)
_CHECKSUM = slice(148, 156)
_BLOCK = 512


class HeaderFields:
    """What members have in common.

    Args:
        user: Name of the owner.
        group: Name of the group.
        mode: Permissions.
        mtime: Seconds since 1970.

    Raises:
        ConfigError: If a name is too long, or a number too large.
    """

    def __init__(self, user: str, group: str, mode: int, mtime: int) -> None:
        names = [name.encode() for name in (user, group)]
        if max(map(len, names)) > 31 or not 0 <= mode < 8**7 or not 0 <= mtime < 8**11:
            raise ConfigError(
                f"{user=}, {group=}, {mode=:o}, {mtime=}: names have at most 31 bytes, and numbers "
                "are positive"
            )
        self._values = (
            (_MODE, b"%07o\0" % mode),
            (_MTIME, b"%011o\0" % mtime),
            (_USER, names[0].ljust(32, b"\0")),
            (_GROUP, names[1].ljust(32, b"\0")),
        )

    def applied_to(self, header: bytes) -> bytes:
        """Return a header, the last one if there are extended ones before it, with these values."""
        start = len(header) - _BLOCK
        block = bytearray(header[start:])
        change = 0
        for place, value in self._values:
            change += sum(value) - sum(block[place])
            block[place] = value
        checksum = int(block[_CHECKSUM].strip(b"\0 "), 8) + change
        block[_CHECKSUM] = b"%06o\0 " % checksum
        return header[:start] + bytes(block)
