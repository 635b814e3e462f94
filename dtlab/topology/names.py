"""Topologies by name, as people type them: torus:4x4, or racks:4x8,oversubscription=2."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtlab.checks import check_choice
from dtlab.errors import ConfigError
from dtlab.topology.base import Topology, uniform
from dtlab.topology.compose import compose
from dtlab.topology.files import load
from dtlab.topology.meshes import dragonfly, torus
from dtlab.topology.servers import nvswitch, pcie_server, v100_nvlink
from dtlab.topology.trees import fat_tree, racks
from dtlab.units import bandwidth_of, seconds_of

BUILDERS: dict[str, Callable[..., Topology]] = {
    builder.__name__: builder for builder in
    (uniform, pcie_server, v100_nvlink, nvswitch, racks, fat_tree, torus, dragonfly)
}
MOST_LETTERS = 4096
FILES = (".yaml", ".yml", ".json", ".xml", ".txt", ".conf")


def named(text: str) -> Topology:
    """The topology that `text` names.

    NAME:4x8,key=value calls the builder NAME with 4, 8 and the keyword; bandwidths and latencies
    are written as 25GB/s, 2us. SERVER@NETWORK puts such a server in the place of each host of such
    a network. All else that is a file, or ends in .yaml, .yml, .json, .xml, .txt or .conf, is for
    `load`. Raises `ConfigError` for names and arguments that make no sense.

    >>> named("torus:4x4").ranks, named("nvswitch:8@racks:4x8,oversubscription=2").ranks
    (16, 256)
    """
    if not isinstance(text, str) or len(text) > MOST_LETTERS:
        raise ConfigError(f"a topology is named by a short text such as 'torus:4x4', not "
                          f"{text!r:.60}")
    if Path(text).suffix in FILES or ("\0" not in text and os.path.isfile(text)):
        return load(text)
    server, at, network = text.partition("@")
    if at:
        return compose(named(server), named(network))
    name, _, arguments = text.partition(":")
    check_choice("topology", name, BUILDERS, f", or a file that ends in {' or '.join(FILES)}")
    builder = BUILDERS[name]
    sizes, options = _arguments(text, arguments)
    if len(sizes) > len(_sizes_of(builder)):
        raise ConfigError(f"{text}: too many sizes; write {_usage(name)}")
    try:
        inspect.signature(builder).bind(*sizes, **options)
    except TypeError as error:
        raise ConfigError(f"{text}: {error}; write {_usage(name)}") from None
    return builder(*sizes, **options)


def _arguments(text: str, arguments: str) -> tuple[list[int], dict[str, Any]]:
    """"4x8,gpus=2" → ([4, 8], {"gpus": 2})."""
    sizes: list[int] = []
    options: dict[str, Any] = {}
    for number, part in enumerate(arguments.split(",") if arguments else []):
        key, equals, value = part.partition("=")
        if equals:
            options[key.strip()] = _value(key, value)
            continue
        words = part.split("x")
        if number or not all(re.fullmatch(r" *[0-9]{1,9} *", word) for word in words):
            raise ConfigError(f"{text}: {part!r} is neither sizes, such as 4x8 at the beginning, "
                              f"nor key=value")
        sizes = [int(word) for word in words]
    return sizes, options


def _value(key: str, text: str) -> Any:
    """The value of an argument, by what the end of its name says."""
    if key.endswith("_Bps"):
        return bandwidth_of(text)
    if key.endswith("_s"):
        return seconds_of(text)
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text.strip()


def _sizes_of(builder: Callable[..., Topology]) -> list[inspect.Parameter]:
    """The parameters that count something: these come first, and are written as 4x8."""
    return [parameter for parameter in inspect.signature(builder).parameters.values()
            if parameter.annotation in ("int", "int | None")]


def _usage(name: str) -> str:
    """Say how to name this topology.

    >>> _usage("nvswitch")
    'nvswitch:[GPUS], and key=value for latency_s, bandwidth_Bps, overhead_s'
    """
    counts = _sizes_of(BUILDERS[name])
    sizes = ""
    for parameter in counts:
        word = "x" * bool(sizes) + parameter.name.upper()
        sizes += word if parameter.default is parameter.empty else f"[{word}]"
    known = {parameter.name for parameter in counts}
    options = [key for key in inspect.signature(BUILDERS[name]).parameters if key not in known]
    return f"{name}{':' * bool(sizes)}{sizes}, and key=value for {', '.join(options)}"
