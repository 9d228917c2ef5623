"""All commands call the same things by the same names, and end with the same exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import click
import pytest

from energon.cli.main import main
from tests.commands import ok, run
from tests.datasets import jpeg, make_crude, write_shard
from tests.effort import mixed

NAMES = {
    "split_part": "--split",
    "splits": "--split",
    "num_workers": "--workers",
    "as_json": "--json",
    "progress": "--progress",
    "quarantine": "--quarantine",
    "dataset_config": "--dataset-config",
    "checksum": "--checksum",
    "where": "--where",
    "split_config": "--split-config",
    "overwrite": "--overwrite",
    "field_map": "--field-map",
    "sample_type": "--sample-type",
    "engine": "--engine",
    "address": "--address",
    "wait": "--wait",
    "quiet": "--quiet",
    "verbose": "--verbose",
}
"""The option that each parameter has on every command, whatever aliases there are."""

ALIASES = {"--split": "--split-part", "--workers": "--num-workers"}
"""The names of older programs, which still work."""


def commands(group=main, path=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands())


def options(command):
    return [each for each in command.params if isinstance(each, click.Option)]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_the_same_thing_has_the_same_name_on_every_command(path):
    for option in options(COMMANDS[path]):
        name = NAMES.get(option.name)
        if name is None:
            assert not set(option.opts) & set(NAMES.values()), option.opts
            continue
        assert option.opts[0] == name or option.opts[-1] == name
        assert name not in ALIASES or ALIASES[name] in option.opts
    assert {"--quiet", "--verbose"} <= {
        name for each in options(COMMANDS[path]) for name in each.opts
    }


@pytest.mark.parametrize(
    "name", ["--where", "--kind", "--workers", "--overwrite", "--checksum", "--dataset-config"]
)
def test_an_option_has_one_kind_of_value_in_all_commands(name):
    shown = [
        each for command in COMMANDS.values() for each in options(command) if name in each.opts
    ]
    kinds = {(each.is_flag, each.type.name, each.metavar) for each in shown}
    assert len(kinds) == 1


def test_options_in_groups_exist():
    for name in ("prepare", "pack"):
        command = COMMANDS[(name,)]
        grouped = [each for group in command.groups.values() for each in group]
        assert len(grouped) == len(set(grouped))
        assert set(grouped) <= {each.name for each in options(command)}
        shown = run(name, "--help").output
        assert all(f"\n{title}:\n" in shown for title in (*command.groups, "Options"))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_the_help_of_every_command_has_examples_with_options_that_exist(path):
    known = {
        name
        for option in options(COMMANDS[path])
        for name in (*option.opts, *option.secondary_opts)
    }
    examples = COMMANDS[path].help.replace("\\\n", " ").partition("Example")[2].splitlines()
    lines = [words for each in examples if (words := each.split())[:1] == ["energon"]]
    mine = [words for words in lines if words[1 : len(path) + 1] == [*path]]
    assert mine
    for words in mine:
        assert {word.partition("=")[0] for word in words if re.match("--[a-z]", word)} <= known


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_defaults_are_shown_by_the_parser_and_by_nothing_else(path):
    shown = run(*path, "--help").output
    for option in options(COMMANDS[path]):
        assert "default" not in (option.help or "").lower(), option.opts
        default = option.get_default(click.Context(COMMANDS[path]))
        if option.hidden or option.is_flag or not isinstance(default, (str, int, float)):
            continue
        assert f"[default: {default}" in " ".join(shown.split()), option.opts


ON_A_PLACE = {
    "analyze-debug": "{}",
    "checkpoint diff": "{} {}",
    "checkpoint edit": "{} {out} --world-size 2 --skip-steps 1",
    "checkpoint info": "{}",
    "checkpoint redist": "{} {out} --new-world-size 2",
    "demo": "{}/demo",
    "doctor": "{}",
    "index": "{}",
    "info": "{}",
    "lint": "{}",
    "measure": "{} --name tokens --with builtins:len",
    "mount": "{} {folder}",
    "pack": "{} {out}",
    "plan": "{}",
    "prepare": "{} --non-interactive",
    "prepare-media": "{} --media-metadata-by-extension",
    "preview": "{}",
    "repair": "{}",
    "tar cat": "{} -o {out}.tar",
    "tar create": "{} -o {out}.tar",
    "tar index": "{}",
    "tar ls": "{}",
    "tar proc": "{} -o {out} --command true --allow shell",
    "tar split": "{} -o {out}-%06d.tar --maxcount 2",
    "verify": "{}",
    "view": "{} --port 0",
}
"""Every command, as run on a place."""

OF_METADATASETS = {
    "doctor",
    "info",
    "lint",
    "measure",
    "mount",
    "plan",
    "prepare",
    "preview",
    "view",
}
NOT_THERE = {
    "a missing dataset": "{tmp}/nowhere",
    "a refused connection": "http://127.0.0.1:1/x.tar",
    "an unknown host": "http://no-such-host.invalid/x.tar",
}
BROKEN = {
    "a missing leaf": "splits: {train: {blend: [{path: ds}, {path: nowhere}]}}",
    "a leaf in a store that cannot be reached": "splits: {train: {path: 'http://127.0.0.1:1/x'}}",
    "malformed YAML": "splits: {train: [",
    "a misspelled key": "splits: {train: {pth: ds}}",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("prepared") / "ds", [3])


@pytest.mark.parametrize("command", [" ".join(path) for path in COMMANDS])
def test_what_is_not_there_and_wrong_usage_end_with_2(tmp_path, monkeypatch, prepared, command):
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "1")
    folder = tmp_path / "folder"
    folder.mkdir()
    places = {what: place.format(tmp=tmp_path) for what, place in NOT_THERE.items()}
    if command in OF_METADATASETS:
        for number, (what, text) in enumerate(BROKEN.items()):
            places[what] = str(tmp_path / f"{number}.yaml")
            (tmp_path / f"{number}.yaml").write_text(text)
        (tmp_path / "ds").symlink_to(prepared)
    for what, place in places.items():
        words = ON_A_PLACE[command].format(place, place, out=tmp_path / "out", folder=folder)
        done = run(*command.split(), *words.split())
        assert done.exit_code == 2, (what, done.output)
        assert "Traceback" not in done.output
    assert run(*command.split(), "--no-such-option").exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize("command", [" ".join(path) for path in COMMANDS])
def test_commands_show_no_password_of_an_address(tmp_path, monkeypatch, command):
    monkeypatch.setenv("ENERGON_STORAGE_ATTEMPTS", "1")
    monkeypatch.chdir(tmp_path)
    for address in (
        "http://me:p@s3cr3t@127.0.0.1:1/x.tar",
        "http://me:'a s3cr3t\" @127.0.0.1:1/x",
        "s3://id:a/s3cr3t@bucket/x",
        "http://127.0.0.1:1/x.jsonl?sig='a s3cr3t\"",
        "no-such-scheme://me:s3cr3t@host/x.yaml",
    ):
        folder = tmp_path / "folder"
        folder.mkdir(exist_ok=True)
        words = ON_A_PLACE[command].split()
        places = {"{}": address, "{folder}": str(folder)}
        words = [places.get(word, word.replace("{out}", str(tmp_path / "out"))) for word in words]
        for more in ([], ["too", "many", address]):
            done = run(*command.split(), *words, *more)
            assert done.exit_code in (1, 2), done.output
            assert "s3cr3t" not in done.output


DESCRIPTIONS = {
    ".nv-meta/dataset.yaml": ("doctor", "info", "lint", "plan", "preview"),
    ".nv-meta/split.yaml": ("doctor", "info", "lint", "plan", "preview", "view"),
}
"""The commands that need a description; others do without, or report it as a problem."""
DAMAGES = {
    "*.tar": ("doctor", "index", "lint", "pack", "preview", "repair", "verify"),
    ".info.json": ("doctor", "index", "info", "plan", "preview", "verify"),
}
"""The commands that read what is damaged."""


@pytest.mark.parametrize(
    ("text", "name"), mixed(["a: [", "[1, 2]", "sample_typ: x", "\N{BELL}"], [*DESCRIPTIONS])
)
def test_invalid_descriptions_end_with_2_and_are_problems_to_verify(tmp_path, name, text):
    root = make_crude(tmp_path / "ds", [3])
    (root / name).write_text(text)
    for command in DESCRIPTIONS[name]:
        done = run(command, *ON_A_PLACE[command].format(root).split())
        assert done.exit_code == 2, (command, done.output)
        assert f"{root}/{name}" in done.output
    for command in ("verify", "repair"):
        assert run(command, root).exit_code == 1


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_data_end_with_1(tmp_path, name):
    root = make_crude(tmp_path / "ds", [3])
    (damaged,) = root.rglob(name)
    damaged.write_bytes(damaged.read_bytes()[:700][:-3])
    for command in DAMAGES[name]:
        words = ON_A_PLACE[command].format(root, out=tmp_path / "out")
        done = run(command, *words.split())
        assert done.exit_code == 1, (command, done.output)


def test_what_the_system_refuses_ends_with_2_and_without_a_traceback(tmp_path):
    root = make_crude(tmp_path / "ds", [3])
    shard = next(root.rglob("*.tar"))
    shard.unlink()
    shard.symlink_to(shard)  # a loop, which not even root can open
    for command in ("info", "preview", "plan"):
        done = run(*command.split(), root)
        assert (done.exit_code, type(done.exception)) == (2, SystemExit), (command, done.output)


def test_old_names_of_options_go_on_working(tmp_path):
    root = make_crude(tmp_path / "ds", [3])
    for name in ("--split", "--split-part"):
        assert "'s2'" in run("preview", root, name, "val", "--start", "2").output
        ok("lint", root, name, "val", "--num-workers", "1")
        ok("plan", root, name, "train", "--workers-per-rank", "2")
    ok("verify", root, "--workers", "1")


def test_options_that_mean_nothing_for_what_is_prepared_are_refused(tmp_path):
    root = make_crude(tmp_path / "ds", [3])
    (tmp_path / "mix.yaml").write_text("splits: {train: {path: ds}}")
    ok("prepare", tmp_path / "mix.yaml", "--non-interactive", "-q")
    done = run("prepare", tmp_path / "mix.yaml", "--exclude-from", "x", "--split-ratio", "8,1,1")
    assert done.exit_code == 2
    said = "is a metadataset; --split-ratio and --exclude-from do not apply, omit them"
    assert said in " ".join(done.output.split())
    split = (root / ".nv-meta/split.yaml").read_text()
    done = run("prepare", root, "--tar-index-only", "--split-ratio", "8,1,1")
    assert done.exit_code == 2
    assert "again; --split-ratio does not apply, omit it" in " ".join(done.output.split())
    ok("prepare", root, "--tar-index-only", "--workers", "1")
    assert (root / ".nv-meta/split.yaml").read_text() == split


def test_addresses_of_files_are_paths(tmp_path):
    root = make_crude(tmp_path / "a folder", [3])
    for command in ("info", "lint", "preview", "plan", "verify"):
        ok(command, root.as_uri())


def test_quiet_commands_say_nothing_and_verbose_ones_all(tmp_path):
    for n in range(3):
        (tmp_path / f"in/{n}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / f"in/{n}.txt").write_text("x")
    (tmp_path / "in/0.jpg").write_bytes(jpeg(0))
    assert run("pack", tmp_path / "in", tmp_path / "out", "--quiet").output == ""
    again = ("prepare", tmp_path / "out", "--force-overwrite", "--split-ratio", "1")
    assert "0 of 1 shards were new" in run(*again, "--verbose").output
    quiet = run(*again, "-q").output
    assert "0 of 1 shards" not in quiet
    assert "3 samples" not in quiet
    assert run("info", tmp_path / "out", "--verbose", "--quiet").exit_code == 2
    assert run("-v", "info", tmp_path / "out", "-q").exit_code == 2
    ok("-q", "tar", "-q", "ls", tmp_path / "out/shards/00000.tar")
    assert run("-q", *again).output == run("-q", *again, "-q").output == quiet
    assert "0 of 1 shards were new" in run("-v", *again).output


@pytest.mark.parametrize(
    ("files", "command"),
    [
        (["a.txt", "b.json"], "energon pack {root} {root}_packed"),
        (["a.csv", "b.csv"], "energon pack {root} {root}_packed"),
        (["a.tar"], "energon prepare {root}"),
        (["a.tar.gz"], "energon pack {root} {root}_packed"),
    ],
)
def test_what_is_no_dataset_yet_is_said_to_become_one_by_a_command(tmp_path, files, command):
    from energon import WorkerConfig, get_train_dataset
    from energon.errors import DatasetNotFoundError

    root = tmp_path / "data"
    root.mkdir()
    for name in files:
        (root / name).write_bytes(b"x")
    wanted = command.format(root=root)
    for name in ("info", "lint", "preview", "plan"):
        assert wanted in run(name, root).output
    if "pack" in command and files != ["a.tar.gz"]:
        assert wanted in run("prepare", root, "--non-interactive", "--split-ratio", "1").output
    with pytest.raises(DatasetNotFoundError) as caught:
        get_train_dataset(
            root, worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0), batch_size=1
        )
    assert wanted in str(caught.value)
    if files == ["a.csv", "b.csv"]:
        assert "a .jsonl, .jsonl.gz or .jsonl.zst file" in str(caught.value)


def test_a_table_is_said_to_be_packed(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    for command in ("info", "prepare", "preview"):
        done = run(command, tmp_path / "t.csv")
        assert done.exit_code == 2
        assert f"energon pack {tmp_path}/t.csv {tmp_path}/t_packed" in done.output


def path_parameters(command):
    context = click.Context(command, info_name="energon")
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from path_parameters(command.get_command(context, name))
    for param in command.params:
        if isinstance(param, click.Argument) or param.metavar in ("FILE", "FOLDER", "OUTPUT"):
            yield command, context, param


def test_shells_complete_paths():
    every = list(path_parameters(main))
    kinds = {
        f"{command.name} {param.name}": [e.type for e in param.shell_complete(context, "demo/sh")]
        for command, context, param in every
    }
    assert {name: kind for name, kind in kinds.items() if kind not in (["file"], ["dir"])} == {}
    assert len(every) > 30


@pytest.mark.parametrize(("words", "meant"), [("perpare", "prepare"), ("tar cerate", "create")])
def test_misspelled_commands_are_corrected(words, meant):
    done = run(*words.split(), "x")
    assert done.exit_code == 2
    assert f"Did you mean '{meant}'?" in done.output


@pytest.mark.parametrize("command", ["verify", "repair", "index"])
def test_commands_for_shards_say_what_else_is_there(tmp_path, command):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    write_shard(tmp_path / "shards/0.tar", [("a", {"txt": b"x"})])
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.jpg").write_bytes(jpeg(0))
    (tmp_path / "empty").mkdir()
    for name, said in {
        "t.csv": "is a table; `energon pack",
        "shards": f"run `energon prepare {tmp_path}/shards`",
        "shards/0.tar": f"is a shard; `energon prepare {tmp_path}/shards`",
        "photos": f"`energon lint {tmp_path}/photos` decodes its samples",
        "empty": "holds no files",
        "shrads": "did you mean 'shards'?",
    }.items():
        done = run(command, tmp_path / name)
        assert done.exit_code == 2, done.output
        assert said in done.output


def test_places_without_states_and_logs_end_with_2(tmp_path):
    for command in ("checkpoint info", "analyze-debug"):
        done = run(*command.split(), tmp_path)
        assert done.exit_code == 2
        assert f"{tmp_path}: there are no .json" in done.output


def test_lint_ends_with_2_without_its_list_and_names_files_once(tmp_path):
    root = make_crude(tmp_path / "ds", [3])
    assert run("lint", root, "--exclude-from", tmp_path / "nowhere").exit_code == 2
    said = run("lint", root, "--dataset-config", "nowhere.yaml")
    assert said.output.startswith(f"{root}/.nv-meta/nowhere.yaml is missing")


def test_a_quiet_preparation_shows_nothing_but_its_result(tmp_path):
    write_shard(tmp_path / "in/0.tar", [("a", {"txt": b"x"})])
    assert run("prepare", tmp_path / "in", "-q", "--split-ratio", "1").output == ""


def test_no_folder_is_left_where_shards_to_transform_are_missing(tmp_path):
    said = run("tar", "proc", tmp_path / "no.tar", "-o", tmp_path / "out", "--function", "m:f")
    assert said.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a_tilde_that_no_shell_has_replaced_is_explained():
    assert f"no '~' in {os.getcwd()}; write the whole path" in run("info", "~/data").output


def test_a_command_that_cannot_ask_says_which_option_is_missing(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    # In a process: where click's runner before 8.2 has no more input, it answers for ever.
    done = subprocess.run(
        [sys.executable, "-m", "energon", "checkpoint", "redist", "state.json", "out"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "Missing option '--new-world-size'" in done.stderr


def test_a_folder_of_prepared_datasets_is_prepared_with_a_warning(tmp_path):
    make_crude(tmp_path / "all/a", [1])
    again = ("prepare", tmp_path / "all", "--split-ratio", "1", "--non-interactive")
    assert "contains prepared datasets (a), whose shards" in run(*again).output
    assert (
        "Warning" not in run("prepare", tmp_path / "all/a", *again[2:], "--force-overwrite").output
    )
