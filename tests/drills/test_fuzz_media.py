"""Damaged media, thousands of them: a result or an error of ours, in bounded time and memory."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import resource
import time

from energon.decode.sample_decoder import SampleDecoder
from energon.errors import EnergonError
from energon.formats.compressed import HEAD_BYTES, Unpacked, compression_of
from energon.webdataset.autodecode import Decoder, DecodingError, torch_audio, torch_video
from tests.media_files import damaged, media_files

CASES_AT_LEAST = 100
MOST_SECONDS = 60.0
"""For one part: far more than any of these takes on a busy machine, far less than for ever."""
MOST_MIB = 1500
"""How much the process may grow: some formats take memory for what headers claim, up to limits."""


def test_damaged_media_give_a_result_or_an_error_of_ours(budget):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_fuzz, args=(budget, answers))
    process.start()
    process.join(budget.seconds + 200)
    assert process.exitcode == 0, f"seed {budget.seed}: ended with {process.exitcode}"
    count, bad, grown_mib = answers.get()
    budget.done["cases"] += count
    assert not bad, (budget.seed, bad[:5])
    assert count >= CASES_AT_LEAST
    assert grown_mib < MOST_MIB


def _fuzz(budget, answers):
    import torch  # noqa: F401  # takes memory as well

    decoders = [SampleDecoder(spec, av_decode="torch") for spec in ("rgb8", "pil", "torchrgb")]
    fluid = Decoder("rgb8", torch_audio, torch_video)
    files = media_files()
    for name, data in files.items():
        _decode(decoders, fluid, name, data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    count, bad = 0, []
    for rng in budget.rounds(CASES_AT_LEAST):
        name = rng.choice(sorted(files))
        data = damaged(files[name], rng)
        begun = time.monotonic()
        try:
            _decode(decoders, fluid, name, data)
        except BaseException as error:
            bad.append((name, data.hex(), repr(error)))
        if time.monotonic() - begun > MOST_SECONDS:
            bad.append((name, data.hex(), f"{time.monotonic() - begun:.0f} s"))
        count += 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10) - before
    answers.put((count, bad, grown))


def _decode(decoders, fluid, name, data):
    for decoder in decoders:
        try:
            decoder.decode(f"k.{name}", data)
        except EnergonError:
            continue
    with contextlib.suppress(DecodingError):
        fluid({"__key__": "k", name: data})
    compression = compression_of(data[:HEAD_BYTES])
    if compression is not None:
        unpacked = Unpacked(io.BytesIO(data), compression, origin=name)
        with contextlib.suppress(EnergonError):
            while unpacked.read(1 << 16):
                continue
