"""Open files, commands and servers, with caches and without."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

from common import first, keys, module, raised


def check_names_in_caches(wds, folder):
    name = module(wds, "cache").url_to_cache_name
    urls = ["http://h/a/b/c.tar?x=1", "s3://b/k.tar", "/d/e.tar", "pipe:cat x", "hf://a/b"]
    return [name(url) for url in urls], name(urls[0], 1), raised(name, 3) is not None


def check_streaming_open(wds, folder):
    opener = module(wds, "cache").StreamingOpen()
    (found,) = opener(iter([{"url": first(folder)}]))
    with found["stream"] as stream:
        return found["local_path"] == first(folder), len(stream.read(100))


def check_file_cache_of_local_files(wds, folder):
    cache = module(wds, "cache").FileCache(f"{folder}/cache", verbose=False)
    return cache.get_file(first(folder)) == first(folder), cache.cleaner, cache.cache_dir[-5:]


def check_cleaning_a_folder(wds, folder):
    directory = Path(folder) / "full"
    directory.mkdir(exist_ok=True)
    for name, size in (("a", 10), ("b", 20), ("c", 30)):
        (directory / name).write_bytes(b"x" * size)
    cleanup = wds.LRUCleanup(str(directory), cache_size=50, keyfn=os.path.basename, interval=None)
    cleanup.cleanup()
    first_left = sorted(path.name for path in directory.iterdir())
    cleanup.cache_size = 30
    cleanup.set_cache_dir(str(directory))
    cleanup.cleanup()
    return first_left, sorted(path.name for path in directory.iterdir())


def check_file_types(wds, folder):
    cache = module(wds, "cache")
    path = Path(folder) / "no.tar"
    path.write_bytes(b"nothing")
    return (
        cache.check_tar_format(first(folder)),
        cache.check_tar_format(str(path)),
        "tar archive" in cache.magic_filetype(first(folder)),
        cache.islocal("/a/b"),
        cache.islocal("http://x"),
    )


def check_download(wds, folder):
    target = f"{folder}/copied.tar"
    module(wds, "cache").download(first(folder), target)
    return Path(target).read_bytes() == Path(first(folder)).read_bytes()


def check_gopen_of_files(wds, folder):
    path = f"{folder}/written"
    with wds.gopen(path, "wb") as stream:
        stream.write(b"a\nb\n")
    with wds.gopen(path) as stream:
        line = stream.readline()
    with wds.gopen(f"file:{path}") as stream:
        return line, stream.read(), isinstance(stream, io.BufferedReader)


def check_own_openers(wds, folder):
    schemes = wds.gopen_schemes
    schemes["mine"] = lambda url, *args, **kw: io.BytesIO(Path(first(folder)).read_bytes())
    default = schemes["__default__"]
    schemes["__default__"] = lambda url, *args, **kw: io.BytesIO(url.encode())
    try:
        return (
            keys(wds.WebDataset("mine://x.tar", shardshuffle=False)),
            wds.gopen("megfile://x").read(),
        )
    finally:
        del schemes["mine"]
        schemes["__default__"] = default


def check_an_unknown_scheme(wds, folder):
    return raised(wds.gopen, "nobody://x")


def check_pipes(wds, folder):
    Pipe = module(wds, "gopen").Pipe
    with Pipe("echo hello", mode="rb", shell=True) as stream:
        text = stream.read()
    listed = Pipe(["echo", "a b"], mode="rb")
    found = listed.read()
    listed.close()

    def fails():
        with Pipe("exit 3", mode="rb", shell=True) as stream:
            stream.read()
            stream.wait_for_child()

    tolerant = Pipe("exit 3", mode="rb", shell=True, ignore_status=[3])
    tolerant.read()
    tolerant.close()
    return text, found, raised(fails), tolerant.status


def check_rewriting(wds, folder):
    os.environ["GOPEN_REWRITE"] = "gs://a=/b;http:=https:"
    try:
        rewrite = module(wds, "gopen").rewrite_url
        return [rewrite(url) for url in ("gs://a/x", "http://y", "z")]
    finally:
        del os.environ["GOPEN_REWRITE"]


def allowing(function, *args, **kw):
    """Call a function where commands and pickles are allowed, if that is asked for at all."""
    os.environ["ENERGON_ALLOW"] = "shell,pickle"
    try:
        return function(*args, **kw)
    finally:
        del os.environ["ENERGON_ALLOW"]


def check_commands_as_shards(wds, folder):
    def run():
        whole = wds.WebDataset(f"pipe:cat {first(folder)}", shardshuffle=False)
        cut = f"pipe:head -c 5000 {first(folder)}"
        stops = wds.WebDataset(cut, shardshuffle=False, handler=wds.ignore_and_stop)
        return (
            keys(whole),
            raised(list, wds.WebDataset(cut, shardshuffle=False)),
            len(list(stops)) < 5,
        )

    return allowing(run)


def check_commands_to_write_to(wds, folder):
    def run():
        with wds.gopen(f"pipe:cat > {folder}/piped", "wb") as stream:
            stream.write(b"abc")
        with wds.TarWriter(f"pipe:cat > {folder}/piped.tar") as sink:
            sink.write({"__key__": "a", "txt": "x"})
        found = keys(wds.WebDataset(f"{folder}/piped.tar", shardshuffle=False))
        return Path(f"{folder}/piped").read_bytes(), found

    return allowing(run)


def check_failing_commands(wds, folder):
    def run():
        return raised(list, wds.WebDataset("pipe:exit 3", shardshuffle=False)) is not None

    return allowing(run)


def check_pickles(wds, folder):
    def run():
        dataset = wds.WebDataset(f"{folder}/media.tar", shardshuffle=False).decode()
        sample = next(iter(dataset))
        decode_pickle = module(wds, "filters").decode_pickle
        return (
            sample["pyd"],
            module(wds, "autodecode").unpickle_loads(pickle.dumps({"a": 1})),
            decode_pickle(io.BytesIO(pickle.dumps(5))),
        )

    return allowing(run)


def check_the_switch_of_the_program(wds, folder):
    utils = module(wds, "utils")
    before = utils.enforce_security
    utils.enforce_security = False
    try:
        dataset = wds.WebDataset(f"{folder}/media.tar", shardshuffle=False).decode()
        return next(iter(dataset))["pyd"], wds.gopen("pipe:echo x").read()
    finally:
        utils.enforce_security = before


class Server:
    """A web server of a folder, for as long as a `with` block."""

    def __init__(self, folder):
        import functools
        import http.server

        class Quiet(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *args):
                pass

        handler = functools.partial(Quiet, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)

    def __enter__(self):
        import threading

        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def check_shards_of_a_server(wds, folder):
    with Server(folder) as url:
        return keys(wds.WebDataset(f"{url}/shard-00000{{0..1}}.tar", shardshuffle=False))


def check_a_cache_of_a_server(wds, folder):
    cache = Path(folder) / "served"
    cache.mkdir(exist_ok=True)
    with Server(folder) as url:
        urls = f"{url}/shard-00000{{0..1}}.tar"
        dataset = wds.WebDataset(urls, shardshuffle=False, cache_dir=str(cache))
        one = keys(dataset)
        return one, keys(dataset) == one, "__local_path__" in next(iter(dataset))


def check_files_of_a_cache(wds, folder):
    cache = module(wds, "cache")
    made = cache.FileCache(
        f"{folder}/named",
        url_to_name=cache.url_to_cache_name,
        validator=cache.check_tar_format,
        cache_size=10**9,
    )
    with Server(folder) as url:
        path = made.get_file(f"{url}/shard-000000.tar")
        refused = raised(made.get_file, f"{url}/no.tar")
        (opened,) = made(iter([{"url": f"{url}/shard-000000.tar"}]))
        size = len(opened["stream"].read())
    return os.path.relpath(path, folder), refused is not None, size, type(made.cleaner).__name__


def check_a_missing_object(wds, folder):
    with Server(folder) as url:
        dataset = wds.WebDataset(f"{url}/none.tar", shardshuffle=False)
        return raised(list, dataset) is not None
