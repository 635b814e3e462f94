"""What is written in several places says the same; what the code needs is declared."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import dtlab

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {"torch": "pytorch"}  # where conda-forge's name is another one
BY_PIP = {"pyseccomp"}  # not in conda-forge; `-e .` brings it
NEEDED = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = {name: [Requirement(line) for line in lines]
          for name, lines in PROJECT["optional-dependencies"].items()}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_each_pin_is_for_the_oldest_python_too() -> None:
    """Debian 12 has 3.11.2."""
    (oldest,) = SpecifierSet(PROJECT["requires-python"])
    for name in pins():
        asked = distribution(name).metadata["Requires-Python"] or ""
        assert SpecifierSet(asked).contains(oldest.version), (name, asked)


def test_the_conda_environment_asks_for_what_pyproject_asks_for() -> None:
    text = (ROOT / "environment.yml").read_text()
    listed = {line.strip().removeprefix("- ") for line in text.split("dependencies:")[1].split("\n")
              if re.match(r"  - [^:]+$", line)}
    wanted = {CONDA_NAMES.get(r.name, r.name) + str(r.specifier) for r in NEEDED
              if r.name not in BY_PIP}
    assert listed - {"pip"} == wanted | {f"python{PROJECT['requires-python']}"}
    assert "- conda-forge" in text
    assert "- nodefaults" in text


def test_every_requirement_is_pinned_within_its_range() -> None:
    pinned = {canonicalize_name(name): version for name, version in pins().items()}
    for requirement in chain(NEEDED, *EXTRAS.values()):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} has no pin"
        assert requirement.specifier.contains(version), f"{requirement} but pinned {version}"
    assert pinned["torch"] == "2.13.0"


def test_pins_are_exact_public_versions_and_nothing_else() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)


def test_the_version_stands_everywhere_the_same() -> None:
    assert PROJECT["version"] == dtlab.__version__
    assert f"version: {PROJECT['version']}" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def third_party(folder: str) -> set[str]:
    """Distributions that the code in `folder` imports."""
    modules = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module.split(".")[0])
    owners = packages_distributions()
    return {canonicalize_name(owners[m][0]) for m in modules - set(sys.stdlib_module_names)
            if m in owners and m != "dtlab"}


def test_the_code_imports_only_what_is_declared() -> None:
    declared = {canonicalize_name(r.name)
                for r in [*NEEDED, *EXTRAS["bench"], *EXTRAS["teach"]]}
    with_these = {"ipython", "pyzmq", "traitlets"}  # foundations of ipykernel and ipywidgets
    assert third_party("dtlab") <= declared | with_these


@pytest.mark.parametrize("name", ["Makefile", "README.md", "pyproject.toml", "constraints.txt"])
def test_no_index_or_host_of_packages_is_written_down(name: str) -> None:
    text = (ROOT / name).read_text()
    assert not re.search(r"index-url|find-links|trusted-host|file://", text)


def test_the_robot_script_can_be_executed() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
