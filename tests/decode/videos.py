"""Audio and video files that tests encode for themselves, and what a plain decoder says of them."""

from __future__ import annotations

import io
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import av
import numpy as np


class Kind(NamedTuple):
    """How a file is made."""

    name: str
    format: str
    codec: str
    audio: str | None
    options: dict[str, str] = {}  # noqa: RUF012
    rate: int = 16000
    fps: int = 10
    variable: bool = False


KINDS = [
    Kind("mp4", "mp4", "libx264", "aac"),
    Kind(
        "mp4 with leading pictures",
        "mp4",
        "libx264",
        "aac",
        {"x264-params": "open-gop=1:bframes=3:keyint=10:min-keyint=10:scenecut=0"},
    ),
    Kind("mp4 of variable rate", "mp4", "libx264", None, variable=True),
    Kind("fragmented mp4", "mp4", "libx264", "aac", {"movflags": "frag_keyframe+empty_moov"}),
    Kind("mov", "mov", "mpeg4", "pcm_s16le"),
    Kind("mkv", "matroska", "libx264", "aac"),
    Kind("mkv of variable rate", "matroska", "libx264", "flac", variable=True, rate=44100),
    Kind(
        "webm of VP8",
        "webm",
        "libvpx",
        "libopus",
        {"auto-alt-ref": "1", "lag-in-frames": "8", "deadline": "realtime", "cpu-used": "8"},
        rate=48000,
    ),
    Kind(
        "webm of VP9",
        "webm",
        "libvpx-vp9",
        "libopus",
        {"deadline": "realtime", "cpu-used": "8"},
        rate=48000,
    ),
    Kind("avi", "avi", "mpeg4", "libmp3lame", rate=44100),
    Kind("avi with bidirectional frames", "avi", "mpeg4", None, {"bf": "2"}),
    Kind("mpeg transport stream", "mpegts", "mpeg2video", "mp2", rate=44100, fps=25),
    Kind("flv", "flv", "libx264", "aac", rate=44100),
    Kind("odd rate", "mp4", "libx264", "aac", rate=22050, fps=30),
]


def encode_video(kind: Kind, *, frames: int = 45, size: tuple[int, int] = (48, 32)) -> bytes:
    """A video of noise that moves, with tones; every frame differs from all others."""
    buffer = io.BytesIO()
    width, height = size
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 255, (height // 8, width // 8 + frames, 3), dtype=np.uint8)
    noise = noise.repeat(8, 0).repeat(8, 1)
    options = {k: v for k, v in kind.options.items() if k == "movflags"}
    with av.open(buffer, "w", format=kind.format, options=options) as container:
        video = container.add_stream(kind.codec, rate=kind.fps)
        video.width, video.height, video.pix_fmt, video.gop_size = width, height, "yuv420p", 11
        video.options = {k: v for k, v in kind.options.items() if k != "movflags"}
        audio = kind.audio and container.add_stream(kind.audio, rate=kind.rate, layout="stereo")
        packets = []
        time = 0
        for number in range(frames):
            picture = noise[:, 4 * number : 4 * number + width]
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24")
            frame.pts = time
            time += 1 + (number % 3 if kind.variable else 0)
            packets += video.encode(frame)
        packets += video.encode(None)
        if audio:
            packets += encode_audio(audio, kind.rate, frames / kind.fps)
        packets = [packet for packet in packets if packet.size]
        for packet in sorted(packets, key=lambda packet: packet.dts * packet.time_base):
            container.mux(packet)
    return buffer.getvalue()


@cache
def video_named(name: str, *, frames: int = 45) -> bytes:
    """The video of a kind, which is encoded once."""
    return encode_video(next(kind for kind in KINDS if kind.name == name), frames=frames)


def cut_segment(
    data: bytes, format: str, start: float, stop: float, *, audio: bool = True
) -> bytes:
    """Packets of a file from the key frame before `start`, copied with their time stamps."""
    buffer = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(buffer, "w", format=format) as target:
        streams = [stream for stream in source.streams if audio or stream.type == "video"]
        copies = {stream: target.add_stream_from_template(stream) for stream in streams}
        packets = [packet for packet in source.demux(streams) if packet.size]
        keys = [
            packet.pts * packet.time_base
            for packet in packets
            if packet.stream.type == "video" and packet.is_keyframe
        ]
        key = max(time for time in keys if time <= start)
        for packet in packets:
            first = key if packet.stream.type == "video" else start
            if first <= packet.pts * packet.time_base < stop:
                packet.stream = copies[packet.stream]
                target.mux(packet)
    return buffer.getvalue()


def encode_lasting(format: str, codec: str, *, last_seconds: float) -> tuple[bytes, list[float]]:
    """Twenty frames of 0.04 or 0.1 s before a last one that lasts; and when each one is shown."""
    times = np.cumsum([0, *(100 if number % 3 else 40 for number in range(19))])
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=format) as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        packets = []
        for number, time in enumerate(times.tolist()):
            pixels = np.full((32, 48, 3), 12 * number, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            packets += stream.encode(frame)
        packets = [packet for packet in packets + stream.encode(None) if packet.size]
        packets[-1].duration = round(Fraction(last_seconds) / packets[-1].time_base)
        for packet in packets:
            container.mux(packet)
    return buffer.getvalue(), [time / 1000 for time in times.tolist()]


def tones(rate: int, seconds: float) -> np.ndarray:
    """Two channels of 16-bit samples in which no place is like another."""
    at = np.arange(int(rate * seconds)) / rate
    left = np.sin(2 * np.pi * (200 + 150 * at) * at) + 0.1 * np.random.default_rng(
        1
    ).standard_normal(len(at))
    right = np.sin(2 * np.pi * (900 - 100 * at) * at)
    return (np.stack([left, right]) * 9000).astype(np.int16)


def encode_audio(stream, rate, seconds):
    if stream.codec_context.name == "aac":
        # Else decoders fill in noise of their own, which is never the same.
        stream.options = {"aac_pns": "0"}
    resampler = av.AudioResampler(
        stream.codec_context.format,
        "stereo",
        rate,
        frame_size=stream.codec_context.frame_size or 1024,
    )
    samples = tones(rate, seconds)
    packets = []
    frame = av.AudioFrame.from_ndarray(
        np.ascontiguousarray(samples.T.reshape(1, -1)), "s16", "stereo"
    )
    frame.sample_rate, frame.pts = rate, 0
    for piece in (*resampler.resample(frame), *resampler.resample(None)):
        packets += stream.encode(piece)
    return packets + stream.encode(None)


def plain_frames(data: bytes) -> tuple[np.ndarray, list[float]]:
    """All frames as PyAV gives them one after the other, and when each is shown."""
    with av.open(io.BytesIO(data)) as container:
        origin = max(0, container.start_time or 0) / 1_000_000
        frames = list(container.decode(video=0))
    times = [
        float((frame.pts if frame.pts is not None else frame.dts) * frame.time_base) - origin
        for frame in frames
    ]
    return np.stack([frame.to_ndarray(format="rgb24") for frame in frames]), times


def plain_audio(data: bytes) -> np.ndarray:
    """All samples as PyAV gives them, as floats with a row for each channel."""
    with av.open(io.BytesIO(data)) as container:
        pieces = []
        for frame in container.decode(audio=0):
            piece = frame.to_ndarray()
            if not frame.format.is_planar:
                piece = piece.reshape(-1, frame.layout.nb_channels).T
            if piece.dtype.kind == "i":
                piece = piece / -float(np.iinfo(piece.dtype).min)
            pieces.append(piece.astype(np.float32))
    return np.concatenate(pieces, axis=1)
