"""Print constraints.txt: the exact version of everything in .venv, dtlab itself left out."""

from __future__ import annotations

from importlib.metadata import distributions

HEAD = """\
# The exact versions that tests and classrooms use; `make setup` installs with them.
# pyproject.toml gives the ranges. To move on: in .venv
#     pip install -U -e '.[test,teach,bench,site]' 'jsonschema<4.25'
# (a newer one parses a grammar for a second whenever Jupyter starts), `make test`, then
# `make constraints` writes this file again."""

NOT_PINNED = {"dtlab", "pip", "wheel"}  # ourselves, and what installs the rest


def public(version: str) -> str:
    """2.13.0 for 2.13.0+cpu: the part after + says which build, and each machine has its own."""
    return version.partition("+")[0]


if __name__ == "__main__":
    versions = {d.metadata["Name"]: public(d.version) for d in distributions()}
    print(HEAD)
    for name in sorted(versions.keys() - NOT_PINNED, key=str.lower):
        print(f"{name}=={versions[name]}")
