from __future__ import annotations

import sys

import pytest

from energon.errors import ConfigError, SecurityError
from energon.samples.registry import SAMPLE_TYPES, resolve_class
from energon.samples.types import CaptioningSample, OCRSample, VQAOCRSample


def test_our_names_are_known_by_both_paths_and_old_ones_too():
    for module in ("megatron.energon", "energon", "megatron.energon.flavors"):
        assert resolve_class(module, "CaptioningSample") is CaptioningSample
    assert resolve_class("megatron.energon", "OCRWebdataset") is OCRSample
    assert resolve_class("megatron.energon", "VQAOCRWebdataset") is VQAOCRSample
    assert len(SAMPLE_TYPES) == 12


def test_unknown_names_get_the_nearest_spelling():
    with pytest.raises(ConfigError, match="did you mean 'CaptioningSample'"):
        resolve_class("megatron.energon", "CaptionSample")


def test_modules_are_only_imported_where_that_is_allowed(tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text("class Mine: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SecurityError, match="ENERGON_ALLOW=code"):
        resolve_class("evil_module", "Mine")
    assert "evil_module" not in sys.modules
    monkeypatch.setenv("ENERGON_ALLOW", "shell,code")
    assert resolve_class("evil_module", "Mine").__name__ == "Mine"
    monkeypatch.delenv("ENERGON_ALLOW")
    assert resolve_class("evil_module", "Mine").__name__ == "Mine"  # imported by now
    with pytest.raises(ConfigError, match="has no 'Other'"):
        resolve_class("evil_module", "Other")
    del sys.modules["evil_module"]
