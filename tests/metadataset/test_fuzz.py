"""Whatever is written in a document, it is understood or refused with its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError, DatasetNotFoundError, FormatError
from energon.metadataset.dataset_config import load_dataset_config
from energon.metadataset.resolve import resolve
from tests.metadataset.folders import make_datasets

EXAMPLES = Path(__file__).with_name("examples")
DOCUMENTS = [path.read_text() for path in sorted((EXAMPLES / "metadataset").iterdir())]
DESCRIPTIONS = [path.read_text() for path in sorted((EXAMPLES / "dataset").iterdir())]
REFUSALS = (ConfigError, FormatError, DatasetNotFoundError)

SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
WORDS = sorted(set(re.findall(r"[\w.%/-]+", "\n".join(DOCUMENTS))))
SCALARS = (
    st.sampled_from([*WORDS, "", "a", "b", "inner.yaml", "m.yaml", "${a}", "${", "ramp to 1"])
    | st.sampled_from(["auto", "end", "50%", "-1%", "://", "nosuch://x", "s3://", "\0", "ü", "~"])
    | st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers(min_value=-(10**400), max_value=10**400)
    | st.floats()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzz")
    make_datasets(root, "a", "b", "coco", "coyo")
    (root / "inner.yaml").write_text("splits: {train: {path: a}, val: {path: b}}")
    return root


def refusal(call):
    """Return how a call refuses what it is given; None if it does not."""
    try:
        call()
    except REFUSALS as exc:
        return str(exc)
    return None


def check(path, call):
    """A refusal starts with the file. Any other exception is a failure."""
    message = refusal(call)
    assert message is None or message.startswith(str(path))


@st.composite
def mangled_text(draw, texts):
    """A text in which some pieces were removed, repeated, moved or replaced."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 20)))
        piece = draw(
            st.sampled_from(["", text[start:stop] * 2, *"{}[]:,-#&*!|>'\"%@`~ \n\t\\\0\ud800"])
            | st.sampled_from(
                ["<<: ", "&x ", "*x ", "? ", ": ", "\n---\n", "!!python/x ", "\n  - "]
            )
            | st.sampled_from(WORDS)
        )
        text = text[:start] + piece + text[stop:]
    return text


@given(mangled_text(DOCUMENTS))
@SETTINGS
def test_a_mangled_text_is_understood_or_refused(folder, text):
    path = folder / "m.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    check(path, lambda: resolve(path, split_part="train", allow=("env",)))


@given(st.binary(max_size=60))
@settings(SETTINGS, max_examples=50)
def test_any_bytes_are_understood_or_refused(folder, content):
    path = folder / "m.yaml"
    path.write_bytes(content)
    check(path, lambda: resolve(path, split_part="train", allow=("env",)))


def addresses(value, address=()):
    yield address
    if isinstance(value, dict):
        for key, item in value.items():
            yield from addresses(item, (*address, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from addresses(item, (*address, number))


def replaced(value, address, new):
    if not address:
        return new
    key, *rest = address
    if isinstance(value, list):
        return [replaced(v, rest, new) if n == key else v for n, v in enumerate(value)]
    return {k: replaced(v, rest, new) if k == key else v for k, v in value.items()}


@st.composite
def mangled_values(draw, texts):
    """A document in which some values were replaced by others, of any kind."""
    document = yaml.safe_load(draw(st.sampled_from(texts)))
    for _ in range(draw(st.integers(1, 2))):
        address = draw(st.sampled_from([*addresses(document)]))
        document = replaced(document, address, draw(VALUES))
        if not isinstance(document, dict):
            break
    return document


@pytest.mark.slow
@given(mangled_values(DOCUMENTS))
@SETTINGS
def test_values_that_nobody_expects_are_understood_or_refused(folder, document):
    path = folder / "m.yaml"
    path.write_text(yaml.safe_dump(document))
    check(path, lambda: resolve(path, split_part="train", allow=("env",)))
    if isinstance(document, dict):
        assert refusal(lambda: resolve(document, split_part="train", allow=("env",))) != ""


@given(st.one_of(mangled_text(DESCRIPTIONS), mangled_values(DESCRIPTIONS).map(yaml.safe_dump)))
@SETTINGS
def test_a_mangled_description_of_samples_is_understood_or_refused(folder, text):
    path = folder / "a/.nv-meta/dataset.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    check(path, lambda: load_dataset_config(folder / "a"))
