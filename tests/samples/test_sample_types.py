from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType

import pytest

from energon.errors import ConfigError, SecurityError
from energon.samples.sample import Sample, edataclass
from energon.samples.sample_types import (
    CaptioningSample,
    OCRSample,
    VQAOCRSample,
    resolve_class,
    resolve_function,
    sample_types,
)


def test_our_names_are_known_by_both_paths_and_old_ones_too():
    for module in ("megatron.energon", "energon", "megatron.energon.flavors"):
        assert resolve_class(module, "CaptioningSample") is CaptioningSample
    assert resolve_class("megatron.energon", "OCRWebdataset") is OCRSample
    assert resolve_class("megatron.energon", "VQAOCRWebdataset") is VQAOCRSample
    assert len(sample_types()) == 13


def test_unknown_names_get_the_nearest_spelling():
    with pytest.raises(ConfigError, match="did you mean 'CaptioningSample'"):
        resolve_class("megatron.energon", "CaptionSample")


@edataclass
class Mine(Sample):
    text: str

    @edataclass
    class Inner(Sample):
        text: str


class Other:
    pass


OBJECT = Mine(__key__="a", text="b")


def test_classes_of_the_program_are_found_in_modules_that_are_loaded():
    assert resolve_class(__name__, "Mine") is Mine
    # Imported by the program from elsewhere, too: it is in its namespace.
    assert resolve_class(__name__, "OCRSample") is OCRSample


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("Other", SecurityError, "not a subclass of energon.Sample"),
        ("OBJECT", SecurityError, "not a subclass of energon.Sample"),
        ("resolve_class", SecurityError, "not a subclass of energon.Sample"),
        ("sys", SecurityError, "not a subclass of energon.Sample"),
        ("Mine.Inner", SecurityError, "names with dots may lead anywhere"),
        ("sys.exit", SecurityError, "names with dots may lead anywhere"),
        ("Mina", ConfigError, "has no 'Mina', did you mean 'Mine'?"),
        ("", ConfigError, "has no ''"),
    ],
)
def test_nothing_else_is(name, kind, message):
    with pytest.raises(kind, match=message) as info:
        resolve_class(__name__, name)
    assert "ENERGON_ALLOW=code" in str(info.value)


def test_other_kinds_of_classes_are_found_where_they_are_expected():
    assert resolve_class(__name__, "Other", kinds=(Sample, Other)) is Other
    assert resolve_class("energon", "Crude", ours={"Crude": Other}) is Other


def test_with_code_allowed_names_stand_for_anything():
    assert resolve_class(__name__, "Mine.Inner", allow=("code",)) is Mine.Inner
    assert resolve_class("os.path", "join", allow="code") is os.path.join
    assert resolve_function("os.path", "join", allow=("code",)) is os.path.join
    with pytest.raises(ConfigError, match="a class is named by __class__"):
        resolve_function(__name__, "Mine", allow=("code",))
    with pytest.raises(ConfigError, match="did you mean 'code'"):
        resolve_class(__name__, "Mine.Inner", allow=("coed",))


def test_functions_need_code_allowed():
    with pytest.raises(
        SecurityError, match=r'allow=\("code",\), with --allow code on .*ALLOW=code'
    ):
        resolve_function(__name__, "test_functions_need_code_allowed")


def test_modules_are_only_imported_where_that_is_allowed(tmp_path, monkeypatch):
    text = "from energon import Sample\nclass Mine(Sample): pass\n"
    (tmp_path / "evil_module.py").write_text(text)
    (tmp_path / "broken_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SecurityError, match="ENERGON_ALLOW=code"):
        resolve_class("evil_module", "Mine")
    assert "evil_module" not in sys.modules
    monkeypatch.setenv("ENERGON_ALLOW", "shell,code")
    assert resolve_class("evil_module", "Mine").__name__ == "Mine"
    with pytest.raises(ConfigError, match="cannot import 'broken_module': ZeroDivisionError"):
        resolve_class("broken_module", "Mine")
    monkeypatch.delenv("ENERGON_ALLOW")
    assert resolve_class("evil_module", "Mine").__name__ == "Mine"  # imported by now
    with pytest.raises(ConfigError, match="has no 'Other'"):
        resolve_class("evil_module", "Other")
    del sys.modules["evil_module"]


def test_looking_at_a_lazy_module_does_not_load_it(tmp_path, monkeypatch):
    (tmp_path / "lazy_module.py").write_text("raise SystemExit('loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.find_spec("lazy_module")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    with pytest.raises(ConfigError, match="has no 'Mine'"):
        resolve_class("lazy_module", "Mine")


def test_modules_are_not_asked_for_what_they_make_when_it_is_asked_for(monkeypatch):
    def never(name):
        raise SystemExit(name)

    module = ModuleType("asked_module")
    module.__getattr__ = never
    monkeypatch.setitem(sys.modules, "asked_module", module)
    with pytest.raises(ConfigError, match="has no 'Mine'"):
        resolve_class("asked_module", "Mine")


def test_what_is_no_module_and_what_lies_about_its_class_is_not_believed(monkeypatch):
    class Liar:
        __class__ = property(lambda self: type)
        __mro__ = property(lambda self: (Sample,))

    module = ModuleType("lying_module")
    module.Mine = Liar()
    monkeypatch.setitem(sys.modules, "lying_module", module)
    with pytest.raises(SecurityError, match="not a subclass"):
        resolve_class("lying_module", "Mine")
    monkeypatch.setitem(sys.modules, "no_module", {"Mine": Mine})
    with pytest.raises(ConfigError, match="has no 'Mine'"):
        resolve_class("no_module", "Mine")
