"""Pages hang together: links lead somewhere, and no page or public name is left out."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import subprocess
import tomllib
from importlib import import_module
from itertools import pairwise

import pytest
import yaml

import energon
import energon.packing
import energon.transforms
from docs.site import build, diagrams, reference, sizes
from energon import webdataset
from energon.cli.prepare import command as prepare
from energon.errors import EnergonError
from energon.limits import CAPABILITIES
from tests.docs.conftest import ROOT
from tests.docs.markdown import anchors, links

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
)


def test_messages_say_what_there_is_to_do_instead_of_naming_pages_that_wheels_do_not_have():
    naming = {
        path.relative_to(ROOT).as_posix(): re.findall(r"docs/\w+\.md", _without_docstrings(text))
        for path in ROOT.glob("src/energon/**/*.py")
        if "docs/" in (text := path.read_text())  # few of them need to be parsed
    }
    assert {path: pages for path, pages in naming.items() if pages} == {}


def _without_docstrings(source):
    """Return the strings of a module that are more than expressions on their own."""
    tree = ast.parse(source)
    alone = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return "\n".join(
        str(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) not in alone
    )


@pytest.mark.parametrize("name", PAGES)
def test_the_links_of_a_page_lead_somewhere(name):
    page = ROOT / name
    broken = []
    for link in links(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        known = anchors(target.read_text()) if target.suffix == ".md" and target.exists() else ()
        if not target.exists() or (anchor and anchor not in known):
            broken.append(link)
    assert not broken


def test_every_page_can_be_reached_from_the_index():
    index = ROOT / "docs/index.md"
    reached, ahead = set(), [index]
    while ahead:
        page = ahead.pop()
        if page in reached:
            continue
        reached.add(page)
        for link in links(page.read_text()):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.exists():
                ahead.append(target)
    missing = {page.name for page in ROOT.glob("docs/*.md")} - {page.name for page in reached}
    assert not missing


def test_every_page_is_in_one_part_of_the_menu():
    pages = [page for pages in build.MENU.values() for page in pages.split()]
    written = {path.stem for path in ROOT.glob("docs/*.md")} - {"index"}
    assert sorted(pages) == sorted(written | {"api/index", "changes", "contributing"})


def test_guides_end_with_pitfalls():
    last = {
        name: re.findall(r"^## (.*)$", (ROOT / f"docs/{name}.md").read_text(), re.MULTILINE)[-1]
        for name in build.MENU["Guides"].split()
    }
    assert set(last.values()) == {"Pitfalls"}, last


def test_the_reference_has_every_public_name_and_says_what_docstrings_say():
    public = {name for name in energon.__all__ if name != "__version__"}
    public |= {*energon.packing.__all__, *energon.transforms.__all__}
    assert public <= reference.named(), "add the names to docs/site/reference.py"
    overview = reference.overview()
    assert not [name for name in public if f"[`{name}`]" not in overview]
    pages = "\n".join(reference.pages().values())
    assert not [name for name in public if f"## {name}\n" not in pages]


def test_names_that_are_said_to_be_missing_are_missing():
    page = (ROOT / "docs/migration.md").read_text()
    table = page.partition("**What is missing.**\n\n")[2].partition("\n\n")[0]
    names = [
        name
        for row in table.splitlines()
        for name in re.findall(r"`(\w+)`", row.removeprefix("|").partition("|")[0])
    ]
    assert names
    assert not [name for name in names if name in energon.__all__]


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_diagrams_are_what_the_code_says(name):
    drawn = (ROOT / f"docs/images/{name}.svg").read_text()
    assert drawn == diagrams.draw(name), "run `make diagrams`"


@pytest.mark.slow
def test_the_table_of_capabilities_has_about_their_sizes():
    written, counted = sizes.written(), sizes.count_capabilities()
    assert written.keys() == counted.keys(), "add or remove the row by hand"
    for name, (files, lines) in counted.items():
        assert written[name] == (
            pytest.approx(files, abs=2, rel=0.05),
            pytest.approx(lines, abs=50, rel=0.05),
        ), f"run `make sizes`: {name}"


def test_the_table_of_layers_has_all_packages_from_top_to_bottom():
    page = (ROOT / "docs/how_it_works.md").read_text()
    table = page.partition("| layer | package | contract |")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    packages = [(int(row[0]), name) for row in rows for name in re.findall(r"`(\w+)/", row[1])]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["type"] == "layers")
    height = {
        name.strip().removeprefix("energon."): -number
        for number, layer in enumerate(layers)
        for name in layer.split("|")
    }
    folders = {path.parent.name for path in (ROOT / "src/energon").glob("*/__init__.py")}
    assert sorted(folders) == sorted(name for _, name in packages)
    for (upper, above), (lower, below) in pairwise(packages):
        assert (upper, height[above]) >= (lower, height[below]), (above, below)
    for path in (ROOT / "src/energon").glob("*/*/__init__.py"):
        package, name = path.parts[-3:-1]
        row = next(row for row in rows if f"`{package}/" in row[1])
        assert f"{name}/`" in " ".join(row), path


def test_every_image_is_shown_and_every_shown_image_is_there():
    pages = "".join(page.read_text() for page in ROOT.glob("docs/*.md"))
    shown = set(re.findall(r"!\[[^\]]+\]\(images/([^)]+)\)", pages))
    assert shown == {path.name for path in (ROOT / "docs/images").iterdir()}


def test_every_program_is_shown_on_one_page():
    pages = "\n".join(page.read_text() for page in ROOT.glob("docs/*.md"))
    programs = {path.name for path in ROOT.glob("examples/*.py")} - {"demo.py"}
    assert sorted(programs) == sorted(re.findall(r"^`examples/(\w+\.py)`$", pages, re.MULTILINE))


def test_the_compose_file_runs_commands_that_exist():
    services = yaml.safe_load((ROOT / "examples/cluster/compose.yaml").read_text())["services"]
    words = shlex.split(shlex.split(services["prepare"]["command"])[2])
    options = {name for each in prepare.params for name in each.opts}
    assert {word for word in words if word.startswith("--")} <= options
    address = words[words.index("--address") + 1]
    assert address in services["worker"]["command"]
    assert services["scheduler"]["command"].rstrip("'").endswith(address.rpartition(":")[2])


def test_job_files_start_a_program_with_options_that_it_has():
    folder = ROOT / "examples/cluster"
    script = (folder / "train.sbatch").read_text()
    subprocess.run(["bash", "-n", folder / "train.sbatch"], check=True)
    service, job = yaml.safe_load_all((folder / "train.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"]
    arguments = pod["containers"][0]["args"]
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{pod['subdomain']}:29500" in arguments
    assert f"--nnodes={job['spec']['completions']}" in arguments
    for words in (shlex.split(script.partition("srun ")[2].partition("&")[0]), arguments):
        (program,) = (word for word in words if word.startswith("examples/"))
        source = (ROOT / program).read_text()
        options = words[words.index(program) + 1 :]
        names = {each.partition("=")[0] for each in options if each.startswith("--")}
        assert names
        assert all(f'"{name}"' in source for name in names)


def test_the_page_on_security_has_all_that_can_be_allowed_and_where():
    page = (ROOT / "docs/security.md").read_text()
    section = page.partition("## What can be allowed")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == CAPABILITIES.keys()
    functions = {name: getattr(energon, name) for name in energon.__all__}
    taking = {
        name
        for name, value in functions.items()
        if (inspect.isfunction(value) or value is energon.SampleDecoder)
        and "allow" in inspect.signature(value).parameters
    }
    assert len(taking) > 4
    assert not {name for name in taking if f"`{name}`" not in section and f"{name}(" not in section}


WITHOUT_EXAMPLE = {
    "TransformMapper": "subclasses are made of `CustomTransform`, which has one",
    **{
        f"{name}Mapper": "`MergeTransform` makes it of the transform of torchvision"
        for name in (
            *("Resize", "RandomResizedCrop", "RandomCrop", "CenterCrop", "RandomHorizontalFlip"),
            *("RandomVerticalFlip", "RandomPerspective", "RandomRotation"),
        )
    },
}
"""Names that users do not call, and why."""


def test_every_public_name_has_an_example():
    lacking = set()
    for module, names in reference.GROUPS.values():
        for name in names.split():
            value = getattr(import_module(module), name)
            is_error = inspect.isclass(value) and issubclass(value, EnergonError)
            # Errors are raised, not called; docs/errors.md shows the message of each.
            if not is_error and "\nExample:\n" not in (inspect.getdoc(value) or ""):
                lacking.add(name)
    assert lacking == WITHOUT_EXAMPLE.keys(), "add an Example section to the docstring"


def test_every_public_name_of_webdataset_has_an_example():
    values = {name: getattr(webdataset, name) for name in webdataset.__all__}
    ours = {
        name: value
        for name, value in values.items()
        if callable(value) and getattr(value, "__module__", "").startswith("energon.webdataset.")
    }
    assert len(ours) > 90
    assert [
        name for name, value in ours.items() if ">>> " not in (inspect.getdoc(value) or "")
    ] == []
