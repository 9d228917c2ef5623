from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import shutil
import tarfile
from types import SimpleNamespace

import cbor2
import msgpack
import pytest
import torch.utils.data
import zstandard

import energon.webdataset as wds
from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    DuplicateSampleKeyError,
    EmptyDatasetError,
    FormatError,
    SecurityError,
    StorageError,
    TruncatedError,
)
from energon.io.files import forget_stores, write_bytes
from energon.limits import Limit
from energon.webdataset import tariterators
from energon.webdataset.gopen import gopen, open_url, rewrite_url
from energon.webdataset.reading.tar_samples import CutOffArchiveError
from energon.webdataset.reading.urls import expand_urls
from tests.commands import run_python
from tests.effort import mixed, some
from tests.servers.clouds import make_bucket, moto
from tests.servers.places import s3_environment
from tests.servers.web import web_server
from tests.webdataset.shards import keys, make_shards, members_of, numbered, tar_bytes

PACK = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor().compress,
}


@pytest.fixture
def urls(tmp_path):
    return make_shards(tmp_path, [3, 4])


def content(path):
    with open(path, "rb") as file:
        return file.read()


def samples(source, **options):
    return keys(wds.WebDataset(source, **options))


def test_patterns_folders_and_lists(tmp_path, urls, monkeypatch):
    monkeypatch.setenv("WDS_ROOT", str(tmp_path))
    for source in (
        urls,
        f"{tmp_path}/shard-{{000000..000001}}.tar",
        f"{tmp_path}/shard-*.tar",
        str(tmp_path),
        tmp_path,
        f"{urls[0]}::{urls[1]}",
        "${ROOT}/shard-{000000..000001}.tar",
        [f"file:{tmp_path}/shard-000000.tar", f"file://{urls[1]}"],
        f"file:{tmp_path}/shard-{{000000..000001}}.tar",
    ):
        assert samples(source) == [*range(7)], source


def test_what_names_no_shards_is_an_error(tmp_path, monkeypatch):
    monkeypatch.delenv("WDS_NOTSET", raising=False)
    for source, error, message in (
        (f"{tmp_path}/*.tar", DatasetNotFoundError, "no file matches"),
        (str(tmp_path), DatasetNotFoundError, "no archives"),
        ([], ConfigError, "no shards"),
        (3, ConfigError, "3 names no shards"),
        ([{"url": "x.tar"}], ConfigError, "'x.tar'} is not the address of a shard; expected"),
        ("${NOTSET}/x.tar", ConfigError, "WDS_NOTSET"),
        ("x-{0..", ConfigError, "x-{0.."),
        (f"{tmp_path}/x.tar", DatasetNotFoundError, "no such file"),
        (f"{tmp_path}/{'x' * 300}.tar", StorageError, "File name too long"),
        ("foo://x/y.tar", ConfigError, "foo"),
    ):
        with pytest.raises(error, match=message.replace("{", r"\{")):
            samples(source)


def test_addresses_of_ipv6_hosts_are_not_torn_apart():
    assert expand_urls("http://[::1]/a.tar::http://[::1]/b.tar") == [
        "http://[::1]/a.tar",
        "http://[::1]/b.tar",
    ]


@pytest.mark.parametrize("kind", PACK)
def test_packed_archives_are_told_by_their_content(tmp_path, urls, kind):
    data = content(urls[0])
    path = tmp_path / "packed"
    path.write_bytes(PACK[kind](data))
    assert samples(str(path)) == [0, 1, 2]
    # Streams that were joined are one, and so are the archives in them.
    path.write_bytes(PACK[kind](data) + PACK[kind](content(urls[1])))
    assert samples(str(path)) == [*range(7)]


@pytest.mark.parametrize("kind", PACK)
def test_damage_of_packed_archives_is_an_error(tmp_path, urls, kind):
    data = PACK[kind](content(urls[0]))
    path = tmp_path / "packed"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises((TruncatedError, FormatError), match="packed: "):
        samples(str(path))
    broken = bytearray(data)
    broken[len(data) // 2] ^= 255
    broken[len(data) // 2 + 1] ^= 255
    path.write_bytes(broken)
    with pytest.raises((TruncatedError, FormatError), match="packed: "):
        samples(str(path))


def test_states_in_packed_archives(tmp_path, urls):
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(content(urls[1])))
    one, other = (wds.WebDataset(str(path)) for _ in range(2))
    first = next(iter(one))
    other.load_state_dict(one.state_dict())
    assert [first["__key__"], *(s["__key__"] for s in other)] == [f"{n:06}" for n in range(3, 7)]


# commands


def command(text):
    return wds.WebDataset(f"pipe:{text}", allow=("shell",))


def test_commands_are_read(urls):
    assert keys(command(f"cat {urls[0]}")) == [0, 1, 2]
    assert keys(command(f"gzip -c {urls[0]}")) == [0, 1, 2]


@pytest.mark.parametrize("delay", ["", "sleep 0.2; "])
def test_a_command_that_fails_after_its_last_byte_gives_no_last_sample(urls, delay):
    dataset = command(f"cat {urls[0]}; {delay}exit 3")
    found = []
    with pytest.raises(StorageError, match="ended with status 3"):
        found.extend(dataset)
    assert len(found) < 3


def test_a_command_that_ends_between_members_is_an_error_though_it_succeeds(urls):
    with pytest.raises(TruncatedError, match="without the end marker"):
        list(command(f"head -c 2048 {urls[0]}"))


def test_leaving_a_command_does_not_wait_for_it(urls):
    loop = iter(command(f"cat {urls[0]}; exec sleep 1000"))
    del loop  # the time limit of tests is less


def test_commands_are_written_to(tmp_path):
    path = tmp_path / "x.tar.gz"
    with wds.TarWriter(f"pipe:gzip -c >{path}", allow=("shell",)) as sink:
        sink.write({"__key__": "000001", "txt": "x"})
    assert samples(str(path)) == [1]
    with pytest.raises(StorageError, match="status 5"):
        wds.TarWriter("pipe:cat >/dev/null; exit 5", allow=("shell",)).close()


# openers and rewriting


def test_openers_of_the_program_come_first(urls, monkeypatch):
    opened = []

    def open_mine(url, mode, bufsize):
        opened.append(url)
        return open(urls[0], mode)

    monkeypatch.setitem(wds.gopen_schemes, "mine", open_mine)
    assert samples("mine://x") == samples("mine:x") == [0, 1, 2]
    assert opened == ["mine://x", "mine:x"]


def test_openers_of_the_program_can_call_those_that_are_built_in(urls, monkeypatch):
    open_command = wds.gopen_schemes["pipe"]
    with pytest.raises(SecurityError):
        open_command("pipe:true")
    monkeypatch.setenv("ENERGON_ALLOW", "shell")
    monkeypatch.setitem(
        wds.gopen_schemes, "pipe", lambda url, mode, bufsize: open_command(f"pipe:cat {url[5:]}")
    )
    assert samples(f"pipe:{urls[0]}") == [0, 1, 2]


def test_opening_anything(tmp_path, urls):
    with gopen(urls[0]) as stream:
        assert stream.read(6) == b"000000"
    with gopen(f"{tmp_path}/out", "wb") as stream:
        stream.write(b"x")
    assert (tmp_path / "out").read_bytes() == b"x"
    with pytest.raises(ConfigError, match="mode='w'"):
        gopen(urls[0], "w")
    with pytest.raises(SecurityError):
        gopen("pipe:true")


def test_rules_for_addresses(monkeypatch):
    monkeypatch.setenv("GOPEN_REWRITE", "s3://(\\w+)/=http://proxy/\\1/;gs://=/data/;")
    assert rewrite_url("s3://bucket/x") == "http://proxy/bucket/x"
    assert rewrite_url("gs://x") == "/data/x"
    assert rewrite_url("/gs://x") == "/gs://x"
    for rule in ("nothing", "(=x"):
        monkeypatch.setenv("GOPEN_REWRITE", rule)
        with pytest.raises(ConfigError, match="REGEX=REPLACEMENT"):
            rewrite_url("x")


# web servers, caches


def test_objects_that_do_not_exist_are_errors_with_their_address(tmp_path):
    with (
        web_server(tmp_path) as server,
        pytest.raises(DatasetNotFoundError, match="nothing.tar"),
    ):
        samples(f"{server.url}/nothing.tar")


@pytest.mark.parametrize("ranges", [True, False])
def test_states_of_shards_on_servers(tmp_path, urls, ranges):
    with web_server(tmp_path, ranges=ranges) as server:
        source = f"{server.url}/shard-{{000000..000001}}.tar"
        one, other = (wds.WebDataset(source) for _ in range(2))
        loop = iter(one)
        first = [next(loop)["__key__"] for _ in range(5)]
        other.load_state_dict(one.state_dict())
        assert first + [s["__key__"] for s in other] == [f"{n:06}" for n in range(7)]


def test_a_cache_keeps_whole_shards_by_their_whole_addresses(tmp_path):
    for folder, start in (("a", 0), ("b", 10)):
        (tmp_path / folder).mkdir()
        data = tar_bytes(members_of(numbered(range(start, start + 3))))
        (tmp_path / folder / "x.tar").write_bytes(data)
    cache = tmp_path / "cache"
    with web_server(tmp_path) as server:
        sources = [f"{server.url}/a/x.tar", f"{server.url}/b/x.tar"]
        expected = [0, 1, 2, 10, 11, 12]
        read, again = (list(wds.WebDataset(sources, cache_dir=cache)) for _ in range(2))
        assert keys(read) == keys(again) == expected
        assert len(list(cache.rglob("x.tar"))) == 2
        paths, again = ([each["__local_path__"] for each in found] for found in (read, again))
        assert paths == again
        assert {*paths} == {str(path) for path in cache.rglob("x.tar")}
        # A file that was replaced on the server is read again.
        (tmp_path / "a/x.tar").write_bytes(tar_bytes(members_of(numbered([7]))))
        assert samples(sources, cache_dir=cache) == [7, 10, 11, 12]


def test_a_cache_does_not_keep_what_is_broken_or_was_left(tmp_path):
    data = tar_bytes(members_of(numbered(range(3))))
    (tmp_path / "cut.tar").write_bytes(data[:4096])
    (tmp_path / "x.tar").write_bytes(data)
    cache = tmp_path / "cache"
    with web_server(tmp_path) as server:
        with pytest.raises(TruncatedError):
            samples(f"{server.url}/cut.tar", cache_dir=cache)
        dataset = wds.WebDataset(f"{server.url}/x.tar", cache_dir=cache)
        next(iter(dataset))
        dataset.close()
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_cache_is_as_large_as_it_may_be(tmp_path):
    make_shards(tmp_path / "data", [3] * 6)
    cache = tmp_path / "cache"
    with web_server(tmp_path / "data") as server:
        source = f"{server.url}/shard-{{000000..000005}}.tar"
        assert samples(source, cache_dir=cache, cache_size=25_000) == [*range(18)]
        held = list(cache.rglob("*.tar"))
        assert sum(path.stat().st_size for path in held) <= 25_000
        assert len(held) == 2
        records = {path.with_name(f".{path.name}.about.json") for path in held}
        files = {path for path in cache.rglob("*") if path.is_file()}
        assert files == {*held, *records, cache / ".usage"}


def test_the_environment_names_a_cache(tmp_path, urls, monkeypatch):
    monkeypatch.setenv("WDS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WDS_CACHE_SIZE", "1e9")
    with web_server(tmp_path) as server:
        assert samples(f"{server.url}/shard-000000.tar") == [0, 1, 2]
    assert list((tmp_path / "cache").rglob("shard-000000.tar"))
    monkeypatch.setenv("WDS_CACHE_SIZE", "much")
    with pytest.raises(ConfigError, match="WDS_CACHE_SIZE"):
        wds.WebDataset("x.tar")


def test_overrides_match_as_much_of_the_path_as_tells_shards_apart(tmp_path):
    data, cache = tmp_path / "data", tmp_path / "cache"
    for folder, start in (("a", 0), ("b", 10)):
        (data / folder).mkdir(parents=True)
        (data / folder / "t-0.tar").write_bytes(tar_bytes(members_of(numbered([start]))))
    (cache / "b").mkdir(parents=True)
    override = tar_bytes(members_of(numbered([99])))
    with web_server(data) as server:
        sources = [f"{server.url}/{folder}/t-0.tar" for folder in "ab"]
        (cache / "b/t-0.tar").write_bytes(override)
        assert samples(sources, cache_dir=cache) == [0, 99]
        # What the cache itself has stored overrides nothing else.
        assert samples(sources, cache_dir=cache) == [0, 99]
        (cache / "b/t-0.tar").rename(cache / "t-0.tar")
        shutil.rmtree(next(cache.glob("127*")))
        assert samples(sources[1:], cache_dir=cache) == [99]
        with pytest.raises(ConfigError, match=r"two shards: .*/a/t-0.tar and .*/b/t-0.tar"):
            wds.WebDataset(sources, cache_dir=cache)
        with pytest.raises(ConfigError, match="two shards"):
            wds.DataPipeline(
                wds.SimpleShardList(sources), wds.cached_tarfile_to_samples(cache_dir=str(cache))
            )


@pytest.mark.parametrize(
    "damage",
    ["empty", "cut off", "changed", "note lost", "note deep", "note a list", "override empty"],
)
def test_damaged_files_of_a_cache_are_fetched_again(tmp_path, damage):
    cache, content = tmp_path / "cache", tar_bytes(members_of(numbered(range(3))))
    (tmp_path / "x.tar").write_bytes(content)
    with web_server(tmp_path) as server:
        url = f"{server.url}/x.tar"
        assert samples(url, cache_dir=cache) == [0, 1, 2]
        (path,) = cache.rglob("x.tar")
        if damage == "changed":
            path.write_bytes(content[:512] + b"\xff" + content[513:])
        elif damage.startswith("note"):
            note = {"note lost": "{", "note deep": "[" * 100_000, "note a list": "[]"}[damage]
            (path.parent / ".x.tar.about.json").write_text(note)
            path.write_bytes(b"what the note was about")
        elif damage == "override empty":
            shutil.rmtree(path.parent)
            (cache / "x.tar").touch()
        else:
            os.truncate(path, 0 if damage == "empty" else 5000)
        requests = len(server.paths)
        assert samples(url, cache_dir=cache) == [0, 1, 2]
        assert len(server.paths) > requests
        assert path.read_bytes() == content
        # And a copy with another date is as good.
        os.utime(path, (1, 1))
        inode = path.stat().st_ino
        assert samples(url, cache_dir=cache) == [0, 1, 2]
        assert path.stat().st_ino == inode


@pytest.mark.slow
@pytest.mark.parametrize("limit", some([0, 1, 5000, 15_000], 4))
def test_a_disk_that_takes_no_shards_costs_time_only(tmp_path, limit):
    (tmp_path / "x.tar").write_bytes(tar_bytes(members_of(numbered(range(30)))))
    (tmp_path / "y.tar").write_bytes(tar_bytes(members_of(numbered(range(30, 40)))))
    with web_server(tmp_path) as server:
        program = f"""
import logging, resource
import energon.webdataset as wds
logging.basicConfig(format="%(levelname)s %(message)s")
urls = [{server.url!r} + name for name in ("/x.tar", "/y.tar")]
dataset = wds.WebDataset(urls, cache_dir={str(tmp_path / "cache")!r})
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
for _ in range(2):
    print([int(sample["__key__"]) for sample in dataset])
"""
        done = run_python(program)
    assert done.stdout.splitlines() == [str([*range(40)])] * 2, done.stderr
    assert done.stderr.count("takes no shards (File too large)") == 1
    assert done.stderr.count("WARNING") == 1


@pytest.mark.slow
def test_variables_show_their_lines_without_a_logging_configuration(tmp_path):
    (tmp_path / "x.tar").write_bytes(tar_bytes(members_of(numbered(range(3)))))
    with web_server(tmp_path) as server:
        program = f"""
import energon.webdataset as wds
for _ in range(2):
    list(wds.WebDataset("{server.url}/x.tar", cache_dir={str(tmp_path / "cache")!r}))
"""

        def said(**variables):
            return run_python(program, **variables).stderr

        assert said(WDS_VERBOSE_CACHE="1", GOPEN_VERBOSE="0").splitlines() == [
            f"{server.url}/x.tar is not in the cache",
            f"{server.url}/x.tar is in the cache",
        ]
        shutil.rmtree(tmp_path / "cache")
        opened = f"opening {server.url}/x.tar (rb)\n"
        assert said(GOPEN_VERBOSE="1", WDS_VERBOSE_CACHE="") == opened


def test_sources_that_draw_shards_on_their_own_draw_differently_unless_deterministic():
    def drawn(draw=list, **options):
        return [draw(wds.ResampledShards("{0..99}", nshards=9, **options)) for _ in range(2)]

    one, other = drawn()
    assert one != other
    one, other = drawn(deterministic=True)
    assert one == other
    one, other = drawn(lambda source: list(wds.DataPipeline(source)))
    assert one == other


def test_opening_stages_of_the_earlier_generation(tmp_path, urls):
    with web_server(tmp_path) as server:
        source = [{"url": f"{server.url}/shard-000000.tar"}]
        cached = wds.FileCache(str(tmp_path / "cache"))
        dataset = wds.DataPipeline(source, cached, wds.tarfile_to_samples())
        assert keys(dataset) == keys(dataset) == [0, 1, 2]
        # Downloaded before it is opened, to the name of the shard; another one of that name goes
        # to its whole path.
        (opened,) = cached(source)
        opened["stream"].close()
        assert opened["local_path"] == str(tmp_path / "cache" / "shard-000000.tar")
        (tmp_path / "other").mkdir()
        shutil.copy(urls[1], tmp_path / "other" / "shard-000000.tar")
        other = cached.get_file(f"{server.url}/other/shard-000000.tar")
        assert content(other) == content(urls[1])
        assert content(opened["local_path"]) == content(urls[0])
    opened = wds.url_opener([{"url": url} for url in urls])
    assert keys(wds.group_by_keys(wds.tar_file_expander(opened))) == [*range(7)]


def test_steps_by_hand_open_shards_as_they_are_stored_and_fill_a_cache(tmp_path, urls):
    packed = gzip.compress(content(urls[0]))
    (tmp_path / "0.tgz").write_bytes(packed)

    def read(shards):
        return keys(wds.group_by_keys(wds.tar_file_expander(shards)))

    with web_server(tmp_path) as server:
        source = [{"url": f"{server.url}/0.tgz"}]
        (opened,) = wds.StreamingOpen()(source)
        assert opened["stream"].read(2) == packed[:2]
        opened["stream"].close()
        assert read(wds.url_opener(source)) == [0, 1, 2]
        cached = wds.FileCache(str(tmp_path / "cache"))
        assert read(cached(source)) == [0, 1, 2]
        (opened,) = cached(source)
        assert content(opened["local_path"]) == packed
        assert read([opened]) == [0, 1, 2]


def test_files_come_without_markers_between_shards(urls):
    """Grouping functions that programs copy from each other read `fname` of every item."""
    files = [*wds.tar_file_expander(wds.url_opener([{"url": url} for url in urls]))]
    assert all("fname" in file for file in files)
    marked = wds.tar_file_expander(wds.url_opener([{"url": urls[0]}]), eof_value={})
    assert [*marked][-1] == {}


def test_a_sample_ends_with_its_shard(tmp_path):
    shards = []
    for number in range(2):
        shards.append({"url": str(tmp_path / f"{number}.tar")})
        (tmp_path / f"{number}.tar").write_bytes(tar_bytes([("same.txt", b"%d" % number)]))
    grouped = wds.group_by_keys(wds.tar_file_expander(wds.url_opener(shards)))
    assert [sample["txt"] for sample in grouped] == [b"0", b"1"]


@pytest.mark.parametrize(
    ("num_workers", "name"), mixed([0, 2], ["url_opener", "tar_file_expander", "group_by_keys"])
)
def test_replaced_functions_of_tariterators_take_effect(urls, monkeypatch, name, num_workers):
    original = getattr(tariterators, name)

    def replaced(data, **options):
        for item in original(data, **options):
            yield {**item, "__replaced__": name}

    expected = sorted(keys(wds.WebDataset(urls, shardshuffle=False)))
    monkeypatch.setattr(tariterators, name, replaced)
    pipelines = [
        wds.WebDataset(urls, shardshuffle=False),
        wds.DataPipeline(wds.SimpleShardList(urls), wds.split_by_worker, wds.tarfile_to_samples()),
    ]
    for pipeline in pipelines:
        loader = torch.utils.data.DataLoader(pipeline, batch_size=None, num_workers=num_workers)
        samples = [*loader]
        assert sorted(keys(samples)) == expected
        if name == "group_by_keys":
            assert all(sample["__replaced__"] == name for sample in samples)


def test_a_replaced_opener_reaches_addresses_that_only_the_program_knows(urls, monkeypatch):
    def opener(data, handler, **options):
        for shard in data:
            number = int(shard["url"].partition("://")[2])
            yield {**shard, "stream": io.BytesIO(content(urls[number]))}

    monkeypatch.setattr(tariterators, "url_opener", opener)
    dataset = wds.WebDataset([f"mine://{n}" for n in range(len(urls))], shardshuffle=False)
    assert keys(dataset) == [*range(7)]


def test_brackets_in_an_address_are_no_pattern(tmp_path, urls):
    folder = tmp_path / "run[a,b]"
    folder.mkdir()
    shutil.copy(urls[0], folder / "x[0].tar")
    assert expand_urls(str(folder / "x[0].tar")) == [str(folder / "x[0].tar")]
    assert expand_urls(str(folder / "*.tar")) == [str(folder / "x[0].tar")]
    with pytest.raises(FileNotFoundError):
        [*wds.WebDataset(str(tmp_path / "x[1].tar"), shardshuffle=False)]


def test_the_last_failure_is_named_if_no_shard_could_be_read(tmp_path):
    missing = str(tmp_path / "missing-{0..1}.tar")
    dataset = wds.WebDataset(missing, handler=wds.ignore_and_continue, shardshuffle=False)
    with pytest.raises(EmptyDatasetError, match=r"no shard could be read.*missing-1\.tar"):
        next(iter(dataset))


# damaged shards


@pytest.mark.parametrize(
    ("handler", "left"),
    [(wds.ignore_and_continue, [3, 4, 5, 6]), (wds.ignore_and_stop, [])],
)
def test_handlers_decide_about_damaged_shards(urls, handler, left):
    data = content(urls[0])
    with open(urls[0], "wb") as file:
        file.write(b"damaged " * 512 + data)
    assert samples(urls, handler=handler, empty_check=False) == left
    streams = wds.url_opener([{"url": url} for url in urls])
    files = wds.tar_file_expander(streams, handler=handler)
    assert keys(wds.group_by_keys(files)) == left
    os.unlink(urls[0])
    assert samples(urls, handler=handler, empty_check=False) == left
    with pytest.raises(DatasetNotFoundError):
        samples(urls)


def test_grouping_by_hand_refuses_a_field_twice():
    members = [
        {"fname": f"0.{field}", "data": b"", "__url__": "x.tar"} for field in ("a", "b", "A")
    ]
    with pytest.raises(
        DuplicateSampleKeyError, match=r"x\.tar: 0\.A: sample '0' has the field 'a'"
    ):
        list(wds.group_by_keys(members))


@pytest.mark.parametrize("field", ["__key__", "__url__"])
def test_fields_that_every_sample_has_are_refused_under_their_name(tmp_path, field):
    (tmp_path / "x.tar").write_bytes(tar_bytes([("0.a", b"1"), (f"0.{field}", b"2"), ("1.a", b"")]))
    url = str(tmp_path / "x.tar")
    with pytest.raises(FormatError, match=f"a field named '{field}' at byte 1024, a name that"):
        list(wds.WebDataset(url))
    by_hand = wds.group_by_keys(wds.tar_file_expander(wds.url_opener([{"url": url}])))
    with pytest.raises(FormatError, match=f"a field named '{field}', a name that every"):
        list(by_hand)
    kept = list(wds.WebDataset(url, handler=wds.ignore_and_continue))
    assert [sample["a"] for sample in kept] == [b"1", b""]


def test_handlers_decide_about_fields_that_a_sample_has_twice(tmp_path):
    long = "x" * 120 + ".a"
    members = [
        ("0.a", b"1"),
        ("0.A", b"2"),
        ("0.b", b"3"),
        (long, b"4"),
        (long, b"5"),
        ("1.a", b""),
    ]
    (tmp_path / "x.tar").write_bytes(tar_bytes(members, format=tarfile.GNU_FORMAT))
    url = str(tmp_path / "x.tar")
    with pytest.raises(FormatError, match="field 'a' twice"):
        list(wds.WebDataset(url))
    kept = list(wds.WebDataset(url, handler=wds.ignore_and_continue))
    assert [(s["a"], s.get("b")) for s in kept] == [(b"1", b"3"), (b"4", None), (b"", None)]
    assert list(wds.WebDataset(url, handler=wds.ignore_and_stop, empty_check=False)) == []


def test_wanted_members_by_pattern_and_function(urls):
    found = list(wds.WebDataset(urls, select_files="*.{txt,cls}"))
    assert all(set(sample) >= {"txt"} and "json" not in sample for sample in found)
    renamed = wds.WebDataset(urls, rename_files=lambda name: name.replace("txt", "text"))
    assert "text" in next(iter(renamed))
    with pytest.raises(ConfigError, match="select_files=3"):
        wds.WebDataset(urls, select_files=3)


# records


def write(path, data):
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize(
    ("stage", "encode"),
    [
        (wds.cbors_to_samples, cbor2.dumps),
        (wds.msgpacks_to_samples, msgpack.packb),
        (wds.jsonl_to_samples, lambda value: b"%d\n\n" % value),
    ],
)
def test_records_of_several_files(tmp_path, stage, encode):
    files = [
        write(tmp_path / f"{n}", b"".join(map(encode, range(n * 10, n * 10 + 5)))) for n in range(3)
    ]
    files.append(write(tmp_path / "packed", gzip.compress(encode(99))))

    def make():
        return wds.DataPipeline(wds.SimpleShardList(files), stage(), wds.shuffle(3))

    expected = list(make())
    assert sorted(expected) == [*range(5), *range(10, 15), *range(20, 25), 99]
    one, other = make(), make()
    loop = iter(one)
    first = [next(loop) for _ in range(6)]
    other.load_state_dict(one.state_dict())
    assert first + list(other) == expected


@pytest.mark.parametrize(
    ("stage", "data"),
    [
        (wds.cbors_to_samples, cbor2.dumps("text")[:-1]),
        (wds.msgpacks_to_samples, msgpack.packb("text")[:-1]),
        (wds.msgpacks_to_samples, b"\xc1"),
        (wds.cbors_to_samples, b"\xff"),
        (wds.jsonl_to_samples, b'{"a"\n'),
    ],
)
def test_damaged_records_are_errors(tmp_path, stage, data):
    path = write(tmp_path / "x", data)
    with pytest.raises(FormatError, match=path):
        list(stage()([path]))
    assert list(stage(handler=wds.ignore_and_continue)([path])) == []


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_damaged_line_of_json_tells_the_column_within_it(tmp_path, end):
    path = write(tmp_path / "x", b'{"a": 1}\n{"a":' + end)
    with pytest.raises(FormatError, match=r"line 2 is not JSON: .* line 1 column 6"):
        list(wds.jsonl_to_samples()([path]))


def test_files_of_records_that_are_cut_off(tmp_path):
    packed = gzip.compress(cbor2.dumps(os.urandom(100)), mtime=0)
    with pytest.raises(CutOffArchiveError, match="x.cbors.gz: the compressed data end too early"):
        list(wds.cbors_to_samples()([write(tmp_path / "x.cbors.gz", packed[:-30])]))
    huge = b"\x5b" + (1 << 40).to_bytes(8, "big") + b"few"  # bytes of this length
    for data in (cbor2.dumps("text")[:-1], huge):
        with pytest.raises(TruncatedError, match="value 1 is truncated"):
            list(wds.cbors_to_samples()([write(tmp_path / "x", cbor2.dumps(7) + data)]))


def test_records_may_be_as_large_as_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr("energon.webdataset.records.DOCUMENT_BYTES", Limit("X", 100, "bytes"))
    text = "x" * 98
    assert len(cbor2.dumps(text)) == len(json.dumps(text)) == 100
    for stage, encode, ends in (
        (wds.cbors_to_samples, cbor2.dumps, [b""]),
        (wds.jsonl_to_samples, lambda value: json.dumps(value).encode(), [b"", b"\n", b"\r\n"]),
    ):
        for end in ends:
            assert list(stage()([write(tmp_path / "x", encode(text) + end)])) == [text]
            with pytest.raises(FormatError, match="value 0 has more than 100 bytes"):
                list(stage()([write(tmp_path / "x", encode(f"{text}y") + end)]))


@pytest.mark.parametrize(
    ("stage", "encode"),
    [
        (wds.cbors_to_samples, cbor2.dumps),
        (wds.msgpacks_to_samples, msgpack.packb),
        (wds.jsonl_to_samples, lambda value: b"%d\n" % value),
    ],
)
def test_streams_of_records_choose_the_size_of_chunks(stage, encode):
    data = b"".join(map(encode, range(300_000)))
    for size in (1000, 1 << 19, len(data)):
        chunks = (data[at : at + size] for at in range(0, len(data), size))
        stream = SimpleNamespace(read=lambda _, chunks=chunks: next(chunks, b""), close=int)
        assert list(stage()([{"url": "mine", "stream": stream}])) == [*range(300_000)]


# folders that others fill


@pytest.mark.parametrize("mode", ["unlink", "keep", "resample"])
def test_folders_that_others_fill(tmp_path, urls, mode):
    dataset = wds.DataPipeline(
        wds.DirectoryShardList(tmp_path, mode=mode, poll=0.01, timeout=0.05, select="oldest"),
        wds.tarfile_to_samples(),
    )
    if mode == "resample":
        found = keys(dataset.compose(wds.slice(20)))
        assert len(found) == 20
    else:
        assert sorted(keys(dataset)) == [*range(7)]
    dataset.close()
    left = sorted(path.name for path in tmp_path.iterdir())
    suffix = {"unlink": None, "keep": "._done_", "resample": ""}[mode]
    assert left == ([] if suffix is None else [f"shard-{n:06}.tar{suffix}" for n in range(2)])


def test_files_that_dead_processes_have_claimed_are_claimed_again(tmp_path, urls):
    os.rename(urls[0], f"{urls[0]}._999999999_")
    dataset = wds.WebDataset(str(tmp_path), mode="unlink").slice(7)
    assert sorted(keys(dataset)) == [*range(7)]
    with pytest.raises(ConfigError, match="mode='x'"):
        wds.WebDataset(str(tmp_path), mode="x")
    with pytest.raises(DatasetNotFoundError, match="no such folder"):
        wds.DirectoryShardList(str(tmp_path / "no"))


def test_bytes_of_a_stream_that_is_open_already(urls):
    stream = io.BytesIO(content(urls[0]))
    assert keys(wds.tarfile_samples([{"url": "mine", "stream": stream}])) == [0, 1, 2]


NOWHERE = {
    "s3://missing/train/0.tar": "s3://missing/train/0.tar: there is no such bucket; check its name",
    "s3://missing/train/": "s3://missing/train: there is no such bucket; check its name",
    "s3://missing/train/*.tar": "s3://missing/train: there is no such bucket; check its name",
    "s3://wds/trian/0.tar": "s3://wds/trian/0.tar does not exist: no 'trian' in s3://wds, did you "
    "mean 'train'?",
    "s3://wds/trian/*.tar": "s3://wds/trian does not exist: no 'trian' in s3://wds, did you mean",
    "s3://wds/train/{0..5}.tar": "s3://wds/train/2.tar does not exist: no '2.tar' in "
    "s3://wds/train, did you mean '1.tar'?",
    "s3://wds/train/x": "s3://wds/train/x does not exist: no 'x' in s3://wds/train, which has "
    "'0.tar', '1.tar', 'about.txt'",
    "s3://wds/train/*.gz": "s3://wds/train/*.gz: no object matches this; s3://wds/train has "
    "'0.tar', '1.tar', 'about.txt'",
    "s3://wds/train": "s3://wds/train is a folder; write s3://wds/train/ for the archives in it",
}
"""Addresses at which there are no shards, and what is wrong with them."""


@pytest.mark.slow
def test_patterns_and_folders_of_a_bucket(tmp_path, urls, monkeypatch):
    with moto() as port:
        for name, value in s3_environment(port).items():
            monkeypatch.setenv(name, value)
        make_bucket(port, "wds")
        forget_stores()
        try:
            for number, path in enumerate(urls):
                write_bytes(f"s3://wds/train/{number}.tar", content(path))
            write_bytes("s3://wds/train/about.txt", b"x")
            for source in ("s3://wds/train/*.tar", "s3://wds/train/", "s3://wds/train/{0..1}.tar"):
                assert samples(source) == [*range(7)]
            for source, reason in NOWHERE.items():
                with pytest.raises(DatasetNotFoundError, match=f"^{re.escape(reason)}"):
                    samples(source)
            with wds.ShardWriter("s3://wds/out/x-%d.tar", maxcount=2) as sink:
                for number in range(5):
                    sink.write({"__key__": f"{number}", "cls": number})
            assert samples("s3://wds/out/") == [*range(5)]
        finally:
            forget_stores()


def test_local_files_have_the_buffers_that_are_wanted(urls, monkeypatch):
    with gopen(urls[0]) as file:
        assert isinstance(file, io.BufferedReader)
    with open_url(urls[0]) as file:
        assert isinstance(file, io.RawIOBase)
    monkeypatch.setenv("GOPEN_BUFFER", "65536")
    with gopen(urls[0]) as file:
        assert isinstance(file, io.BufferedReader)
    assert samples(urls) == [*range(7)]
    monkeypatch.setenv("GOPEN_BUFFER", "much")
    with pytest.raises(ConfigError, match="GOPEN_BUFFER='much'"):
        gopen(urls[0])


def test_the_seed_of_draws_is_logged_if_wanted(urls, monkeypatch, caplog):
    caplog.set_level("INFO", logger="energon")
    next(iter(wds.WebDataset(urls, resampled=True)))
    assert "seed" not in caplog.text
    monkeypatch.setenv("WDS_SHOW_SEED", "1")
    next(iter(wds.WebDataset(urls, resampled=True)))
    assert "drawing from 2 shards with seed" in caplog.text


def test_what_is_opened_is_logged_if_wanted(urls, monkeypatch, caplog):
    monkeypatch.setenv("GOPEN_VERBOSE", "1")
    with caplog.at_level("INFO", "energon"):
        samples(urls[:1])
    assert f"opening {urls[0]}" in caplog.text
