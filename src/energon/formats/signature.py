"""Tell what a file is by its first bytes."""

from __future__ import annotations

SIGNATURE_BYTES = 16

_SIGNATURES = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
    b"\0\0\1\0": "ico",
    b"\0\0\0\x0cjP  ": "jp2",
    b"\xff\x4f\xff\x51": "j2k",
    b"\x1aE\xdf\xa3": "mkv",
    b"FLV\x01": "flv",
    b"fLaC": "flac",
    b"OggS": "ogg",
    b"ID3": "mp3",
    b"\xff\xfb": "mp3",
    b"\xff\xf1": "aac",
}
_RIFF = {b"WEBP": "webp", b"AVI ": "avi", b"WAVE": "wav"}
_BRANDS = {b"avif": "avif", b"avis": "avif", b"heic": None, b"heix": None, b"mif1": None}


def guess_extension(data: bytes) -> str | None:
    """Return the extension that fits `data`: of an image, audio or video file, or None.

    Example:
        >>> guess_extension(b"RIFF....WEBPVP8 ")
        'webp'
    """
    if data[:4] == b"RIFF":
        return _RIFF.get(bytes(data[8:12]))
    if data[4:8] == b"ftyp":
        return _BRANDS.get(bytes(data[8:12]), "mp4")
    return next((name for start, name in _SIGNATURES.items() if data.startswith(start)), None)
