"""Decode the parts of samples by extension."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from energon.decode.av_container import AV_EXTENSIONS, check_av_spec
from energon.decode.values import (
    decode_cbor,
    decode_json,
    decode_msgpack,
    decode_npy,
    decode_npz,
    decode_pth,
    decode_tenbin,
)
from energon.errors import SYSTEM_EXCEPTIONS, ConfigError, DecodeError, EnergonError, SkipSample
from energon.formats.media import guess_extension
from energon.limits import IMAGE_PIXELS, is_allowed, refusal
from energon.messages import bytes_in_words, describe_error
from energon.samples.crude import PART_FILES, CrudeSample, UnreadableSample

if TYPE_CHECKING:
    from energon.decode.images import ImageSpec, RandomResizedCrop, Resize

# Data that are nested too deep end in a RecursionError.
_NOT_OF_THE_DATA: tuple[type[BaseException], ...] = (
    *(kind for kind in SYSTEM_EXCEPTIONS if kind is not RecursionError),
    EnergonError,
    SkipSample,
)
_PICKLED = frozenset({"pkl", "pickle", "pyd", "pth"})


@dataclass(frozen=True)
class SampleDecoder:
    """Decodes the parts of samples by their extensions.

    Text (txt, text, transcript) becomes str; cls, cls2, index, inx, id and count become int; json
    and jsn are parsed; npy becomes an array, npz a dict of arrays, ten and tb lists of arrays; mp,
    msg and cbor their content; images and audio or video take the form of `image_decode` and
    `av_decode`. A trailing `gz` is decompressed first. Other parts stay bytes.

    Args:
        image_decode: The form of images, see `energon.decode.images.IMAGE_SPECS`. The default
            is float tensors (C, H, W) from 0 to 1, or arrays of this layout where torch is not
            installed; "rgb" and "rgb8" are arrays (H, W, C).
        av_decode: The form of audio and video: "AVDecoder" for a decoder of clips on request;
            "torch" for all frames as `AVData`; "pyav" for a container of PyAV.
        video_decode_audio: Whether "torch" decodes the audio of videos too.
        guess_content: Whether to recognize images, audio and video by content instead of name.
        image_size: Height and width of all images, or one number for a square; None keeps their
            sizes. JPEGs are decoded at a half, a quarter or an eighth of their size if that still
            has enough pixels, which is faster. Aspect ratios are not kept, unless
            `random_resized_crop` cuts out a part with the right one.
        min_size: Reduces images by 2, 4 or 8 as long as both sides keep this many pixels, and
            keeps their aspect ratio.
        random_resized_crop: The random part to cut out of each image and scale to `image_size`;
            True draws it like torchvision. It is a function of the run's seed, the sample, its
            epoch and the name of the part, so it is the same on any number of ranks and workers.
            Auxiliary files are not cropped.
        exact_resize: Whether to decode JPEGs in full before scaling them, for the pixels of
            Pillow or torchvision (antialiased) up to rounding.
        max_enlargement: By how much a JPEG may be enlarged to `image_size` after it was decoded
            at a half, a quarter or an eighth of its size. 1.2 is faster for many sizes, and less
            sharp, see the guide to hooks; 1 enlarges only images that are too small as a whole.
        decoders: Your functions by extension: each takes bytes and returns the decoded value;
            None keeps the bytes. They take precedence, longer extensions first: `seg.png` before
            `png` for `left.seg.png`.
        allow: "pickle" permits unpickling pkl, pyd and pth parts, which runs any code in them.
            The environment can permit it too: ENERGON_ALLOW=pickle.

    Raises:
        ConfigError: If `image_decode` or `av_decode` is unknown, sizes are invalid or do not go
            together, or `decoders` contains anything but functions.

    Example:
        >>> decoder = SampleDecoder(decoders={"csv": lambda data: data.split(b","), "jpg": None})
        >>> decoder({"csv": b"1,2", "jpg": b"as it is", "txt": b"text"})
        {'csv': [b'1', b'2'], 'jpg': b'as it is', 'txt': 'text'}
    """

    image_decode: str = "torchrgb"
    av_decode: str = "AVDecoder"
    video_decode_audio: bool = False
    guess_content: bool = False
    allow: Collection[str] = ()
    decoders: Mapping[str, Callable[[bytes], Any] | None] = field(default_factory=dict, hash=False)
    image_size: int | tuple[int, int] | None = None
    min_size: int | None = None
    random_resized_crop: bool | RandomResizedCrop = False
    exact_resize: bool = False
    max_enlargement: float = 1.0
    _resize: Resize | None = field(default=None, init=False, repr=False, compare=False)
    _max_pixels: int | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.image_decode != SampleDecoder.image_decode:
            from energon.decode.images import image_spec

            image_spec(self.image_decode)
        object.__setattr__(self, "_resize", self._make_resize())
        check_av_spec(self.av_decode)
        if not isinstance(self.decoders, Mapping):
            raise ConfigError(
                f"decoders={self.decoders!r}: expected a dict of functions by extension, like "
                "{'csv': read_csv}"
            )
        for extension, decode in self.decoders.items():
            if not isinstance(extension, str) or not (decode is None or callable(decode)):
                raise ConfigError(
                    f"decoders={{{extension!r}: {decode!r}}}: expected a function that takes "
                    "bytes, or None, for each extension"
                )
        decoders = {name.lower().removeprefix("."): own for name, own in self.decoders.items()}
        object.__setattr__(self, "decoders", decoders)

    @property
    def is_random(self) -> bool:
        """Whether decoding depends on a seed."""
        return self._resize is not None and self._resize.crop is not None

    def with_limits(self) -> SampleDecoder:
        """Return a copy that does not look up the limits of the environment for each image."""
        fixed = copy(self)
        object.__setattr__(fixed, "_max_pixels", IMAGE_PIXELS.value)
        return fixed

    def config(self) -> dict[str, Any]:
        """Return all settings that affect decoded values, as plain data."""
        own = {name: _name_of(decode) for name, decode in self.decoders.items()}
        return {
            "type": type(self).__qualname__,
            "image_decode": self.image_decode,
            "av_decode": self.av_decode,
            "video_decode_audio": self.video_decode_audio,
            "guess_content": self.guess_content,
            "resize": None if self._resize is None else asdict(self._resize),
            "decoders": own,
        }

    def __call__(self, sample: Mapping[str, Any], *, seed: int = 0) -> Any:
        """Return a dict of the same type with the parts of `sample` decoded.

        Args:
            sample: Its parts, and entries such as `__key__`.
            seed: Seed of random crops. Loaders derive it from the sample and its epoch.

        Raises:
            DecodeError: If a part is damaged, or the sample could not be read.
        """
        if isinstance(sample, CrudeSample):
            if type(sample) is UnreadableSample:
                raise sample.error
            # Names of this kind have no other case, which it would look for.
            key, files = dict.get(sample, "__key__", ""), dict.get(sample, PART_FILES)
        else:
            key, files = sample.get("__key__", ""), sample.get(PART_FILES)
        decoded = type(sample)()
        for part, data in sample.items():
            # Names like __key__ are about the sample; what is not bytes is decoded already.
            if isinstance(data, bytes) and not part.startswith("__"):
                name = f"{key}.{files.get(part, part) if files else part}"
                decoded[part] = self.decode(name, data, seed=seed)  # type: ignore[index]
            elif files and isinstance(data, list) and isinstance(files.get(part), list):
                decoded[part] = [  # type: ignore[index]
                    each and self.decode(f"{key}.{number}.{file or part}", each, seed=seed)
                    for number, (each, file) in enumerate(zip(data, files[part], strict=True))
                ]
            else:
                decoded[part] = data  # type: ignore[index]
        return decoded

    def of_part(self, part: str) -> Callable[[bytes], Any] | None:
        """Return the decoder of the bytes of a part; None if it needs more than these."""
        is_own = type(self) is not SampleDecoder
        if is_own or self.decoders or self.guess_content or part.startswith("__"):
            return None
        extension = part.rpartition(".")[2].lower()
        decode = DECODERS.get(extension)
        if decode is not None or extension in AV_EXTENSIONS or self.is_random:
            return decode
        from energon.decode.images import IMAGE_EXTENSIONS, decode_image

        if extension not in IMAGE_EXTENSIONS:
            return None
        return partial(
            decode_image, spec=self._image_spec, resize=self._resize, max_pixels=self._max_pixels
        )

    def decode(self, fname: str, raw: bytes, *, seed: int = 0) -> Any:
        """Decode `raw` by the extension of `fname`.

        Args:
            fname: The name of the file, or the key and name of the part.
            raw: The bytes.
            seed: Seed of random crops, together with `fname`.

        Raises:
            DecodeError: If they are damaged.
            SecurityError: If they are pickled, which is not allowed.
            MissingExtraError: If a package is not installed.
        """
        own = self._own(fname) if self.decoders else None
        if own is not None:
            return self._decode_own(own, fname, raw)
        extension = fname.rpartition(".")[2].lower()
        try:
            if extension == "gz":
                from energon.formats.compressed import decompressed

                return self.decode(fname[:-3], decompressed(raw, "gz"), seed=seed)
            if self.guess_content:
                extension = guess_extension(raw) or extension
            decode = DECODERS.get(extension)
            if decode is not None:
                return decode(raw)
            if extension in AV_EXTENSIONS:
                from energon.decode.av import decode_av

                return decode_av(raw, self.av_decode, with_audio=self.video_decode_audio)
            if extension in _PICKLED:
                return self._unpickle(extension, raw)
            from energon.decode.images import IMAGE_EXTENSIONS, decode_image

            if extension in IMAGE_EXTENSIONS:
                return decode_image(
                    raw,
                    self._image_spec,
                    self._resize,
                    seed=seed,
                    name=fname,
                    max_pixels=self._max_pixels,
                )
            return raw
        except DecodeError as error:
            raise DecodeError(f"{fname}: {error}") from error
        except (EnergonError, ImportError):
            # Not the fault of the data.
            raise
        except Exception as error:
            raise DecodeError(
                f"{fname}: {bytes_in_words(raw)}: not {extension}: {describe_error(error)}"
            ) from error

    def _own(self, fname: str) -> str | None:
        """Return the longest extension of a file for which the user has a decoder."""
        steps = fname.rpartition("/")[2].lower().split(".")
        extensions = (".".join(steps[start:]) for start in range(1, len(steps)))
        return next((each for each in extensions if each in self.decoders), None)

    def _decode_own(self, extension: str, fname: str, data: bytes) -> Any:
        decode = self.decoders[extension]
        if decode is None:
            return data
        try:
            return decode(data)
        except DecodeError as error:
            raise DecodeError(f"{fname}: {error}") from error
        except _NOT_OF_THE_DATA:
            raise
        except Exception as error:
            raise DecodeError(
                f"{fname}: the decoder of .{extension} parts failed: {describe_error(error)}"
            ) from error

    @cached_property
    def _image_spec(self) -> ImageSpec:
        """The form of images."""
        from energon.decode.images import IMAGE_SPECS

        return IMAGE_SPECS[self.image_decode]

    def _make_resize(self) -> Resize | None:
        """Return how images are cropped and scaled; None if they are left as they are."""
        if isinstance(self.image_size, list):
            object.__setattr__(self, "image_size", tuple(self.image_size))
        size, crop = self.image_size, self.random_resized_crop
        if size is None and self.min_size is None and crop is False and self.max_enlargement == 1:
            return None
        from energon.decode.images import make_resize

        return make_resize(
            size,
            self.min_size,
            crop,
            exact_resize=self.exact_resize,
            max_enlargement=self.max_enlargement,
        )

    def _unpickle(self, extension: str, data: bytes) -> Any:
        if not is_allowed("pickle", self.allow):
            raise refusal(
                "pickle",
                f"a .{extension} part is pickled, and unpickling runs any code that it contains; "
                "set decoder = None to get its bytes",
            )
        if extension == "pth":
            return decode_pth(data, trusted=True)
        import pickle

        return pickle.loads(data)


def _name_of(function: Callable[[bytes], Any] | None) -> str | None:
    """Return the module and name of a function, or of the type of what is called like one."""
    if function is None:
        return None
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def is_media(name: str) -> bool:
    """Return whether a file of this name is an image, audio or video."""
    from energon.decode.images import IMAGE_EXTENSIONS

    return name.rpartition(".")[2].lower() in {*IMAGE_EXTENSIONS, *AV_EXTENSIONS}


def is_decoded(part: str) -> bool:
    """Return whether a part of this name is decoded rather than kept as bytes.

    Example:
        >>> is_decoded("left.PNG"), is_decoded("json.gz"), is_decoded("parquet")
        (True, True, False)
    """
    from energon.decode.images import IMAGE_EXTENSIONS

    *before, extension = part.lower().split(".")
    if extension == "gz":
        return bool(before) and is_decoded(before[-1])
    return extension in {*IMAGE_EXTENSIONS, *AV_EXTENSIONS, *_PICKLED, *DECODERS}


DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), methodcaller("decode", "utf-8")),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id", "count"), int),
    **dict.fromkeys(("json", "jsn"), decode_json),
    "npy": decode_npy,
    "npz": decode_npz,
    **dict.fromkeys(("ten", "tb"), decode_tenbin),
    **dict.fromkeys(("mp", "msg"), decode_msgpack),
    "cbor": decode_cbor,
}
"""Default decoders by extension."""
