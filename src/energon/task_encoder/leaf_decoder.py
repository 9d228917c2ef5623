"""What decodes the parts of a dataset: its own decoder, or that of the task encoder."""

from __future__ import annotations

from enum import Enum
from typing import Any

from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError
from energon.metadataset.dataset_config import DatasetConfig

_MODULES = ("energon", "megatron.energon")
_SETTINGS = ("image_decode", "av_decode", "video_decode_audio", "guess_content")
"""What data may decide. That code may be run, or what runs, is the program's business."""


class Inherited(Enum):
    """Stands for the decoder of the task encoder."""

    DECODER = "that of the task encoder"


LeafDecoder = SampleDecoder | None | Inherited


def leaf_decoder(config: DatasetConfig) -> LeafDecoder:
    """Return the decoder that a `dataset.yaml` names; None if it wants none.

    Raises:
        ConfigError: If it is no `SampleDecoder`, or has settings that make no sense.
    """
    if "decoder" not in config.given:
        return Inherited.DECODER
    if config.decoder is None:
        return None
    settings = dict(config.decoder)
    named = settings.pop("__module__", _MODULES[0]), settings.pop("__class__", "SampleDecoder")
    if named not in {(module, "SampleDecoder") for module in _MODULES}:
        raise ConfigError(
            f"{config.origin}: decoder {'.'.join(map(str, named))} is not known; wanted is a "
            "SampleDecoder. Set another one as `decoder` of the task encoder"
        )
    for name in settings:
        if name not in _SETTINGS:
            raise ConfigError(
                f"{config.origin}: decoder has no setting {name!r} here, only "
                f"{', '.join(_SETTINGS)}; set others in the `decoder` of the task encoder"
            )
    try:
        return SampleDecoder(**settings)
    except ConfigError as error:
        raise ConfigError(f"{config.origin}: decoder: {error}") from error


def decoder_for(own: LeafDecoder, encoder: Any) -> SampleDecoder | None:
    """Return what decodes the parts of a dataset whose own decoder is `own`."""
    decoder: SampleDecoder | None = encoder.decoder if isinstance(own, Inherited) else own
    return decoder
