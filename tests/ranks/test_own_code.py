"""Installed packages are told from a learner's own modules, wherever Python finds them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import dtlab
from dtlab.ranks.own_code import is_own, own_module


def module_in(folder: Path, name: str = "helpers") -> ModuleType:
    module = ModuleType(name)
    module.__file__ = str(folder / name / "__init__.py")
    return module


@pytest.mark.parametrize("folder", [
    "home/.local/lib/python3.11/site-packages", "usr/lib/python3/dist-packages", "on_a_pth_path"])
def test_a_package_is_installed_wherever_packages_are(tmp_path: Path, folder: str) -> None:
    packages = tmp_path / folder
    packages.mkdir(parents=True)
    if folder == "on_a_pth_path":
        (packages / "helpers-1.0.dist-info").mkdir()
    assert not is_own(module_in(packages))


def test_pythons_dtlabs_and_torchs_modules_are_installed() -> None:
    for module in (json, sys, np, torch, torch.nn.functional, dtlab, sys.modules["__main__"]):
        assert not is_own(module)


def test_a_file_in_any_other_folder_is_the_learners_own(tmp_path: Path) -> None:
    assert is_own(module_in(tmp_path))
    assert own_module(module_in) is sys.modules[__name__]
    assert own_module(torch.add) is own_module(dtlab.run) is None
