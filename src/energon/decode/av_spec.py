"""What parts with audio and video become, by the name of the specification."""

from __future__ import annotations

import io
from typing import Any

from energon.errors import ConfigError

AV_SPECS = ("AVDecoder", "torch", "pyav")


def check_av_spec(name: str) -> None:
    """Raise ConfigError unless there is a specification of that name."""
    if name not in AV_SPECS:
        raise ConfigError(f"av_decode={name!r}: wanted is one of {', '.join(AV_SPECS)}")


def decode_av(data: bytes, spec: str, *, with_audio: bool) -> Any:
    """Return what the specification makes of a file.

    Raises:
        DecodeError: If "torch" or "pyav" is wanted, and the file is damaged.
        MissingExtraError: If PyAV is not installed.
    """
    from energon.decode.av import AVDecoder
    from energon.decode.av_container import check_claims, open_container

    if spec == "pyav":
        check_claims(io.BytesIO(data))
        return open_container(io.BytesIO(data))
    decoder = AVDecoder(io.BytesIO(data))
    return decoder if spec == "AVDecoder" else decoder.get_frames(with_audio)
