"""Classes of programs that documents name."""

from __future__ import annotations

from megatron.energon import (
    DefaultDecoderWebdatasetFactory,
    Sample,
    TextSample,
    edataclass,
)
from megatron.energon.epathlib import EPath


@edataclass
class ChatMLSample(Sample):
    conversation: str
    text: str


class ChatMLWebdataset(DefaultDecoderWebdatasetFactory[ChatMLSample]):
    __sample_type__ = ChatMLSample

    def __init__(self, path: EPath, *, auto_decode: bool = True, **kwargs):
        super().__init__(path, **kwargs)
        if auto_decode:
            self._decoder = lambda sample: {
                name: value.decode() if isinstance(value, bytes) else value
                for name, value in sample.items()
            }


class Filtered(DefaultDecoderWebdatasetFactory[TextSample]):
    __sample_type__ = TextSample

    def sample_filter(self, key: str) -> bool:
        return super().sample_filter(key) and int(key.rpartition("/")[2]) % 2 == 0

    def load_sample(self, sample):
        loaded = super().load_sample(sample)
        loaded.text = f"own {loaded.text}"
        return loaded


@edataclass
class Joined(Sample):
    left: str
    right: str

    @staticmethod
    def from_joined(left: TextSample, right: TextSample) -> Joined:
        return Joined.derive_from(left, left=left.text, right=right.text)


@edataclass
class PackedSample(Sample):
    numbers: dict
    caption: str
