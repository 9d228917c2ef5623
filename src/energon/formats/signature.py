"""Tell what a file is by its first bytes."""

from __future__ import annotations

SIGNATURE_BYTES = 16

_SIGNATURES = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
    b"\0\0\1\0": "ico",
    b"\0\0\0\x0cjP  ": "jp2",
    b"\xff\x4f\xff\x51": "j2k",
    b"\x1aE\xdf\xa3": "mkv",
    b"FLV\x01": "flv",
    b"\0\0\1\xba": "mpg",
    b"\0\0\1\xb3": "mpg",
    b"fLaC\0": "flac",
    b"fLaC\x80": "flac",
    b"OggS\0": "ogg",
    b"\xff\xfb": "mp3",
    b"\xff\xfa": "mp3",
    b"\xff\xf3": "mp3",
    b"\xff\xf2": "mp3",
    b"\xff\xf1": "aac",
    b"\xff\xf9": "aac",
}
_RIFF = {b"WEBP": "webp", b"AVI ": "avi", b"WAVE": "wav"}
_BRANDS = {b"avif": "avif", b"avis": "avif", b"heic": None, b"heix": None, b"mif1": None}


def guess_extension(data: bytes) -> str | None:
    """Return the extension that fits `data`: of an image, audio or video file, or None.

    No text is taken for such a file.

    Example:
        >>> guess_extension(b"RIFF....WEBPVP8 ")
        'webp'
    """
    if data[:4] == b"RIFF":
        return _RIFF.get(bytes(data[8:12]))
    if data[4:8] == b"ftyp":
        return _BRANDS.get(bytes(data[8:12]), "mp4")
    # Texts may begin with these letters, but have no zero bytes and no control characters.
    if data[:2] == b"BM":
        return "bmp" if data[6:10] == bytes(4) else None
    if data[:3] == b"ID3":
        return "mp3" if data[3:4] < b"\x08" and len(data) > 3 else None
    return next((name for start, name in _SIGNATURES.items() if data.startswith(start)), None)
