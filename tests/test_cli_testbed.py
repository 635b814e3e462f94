"""`dtlab testbed` where there can be none: one sentence. Testbeds themselves: test_testbed.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.commands import assert_bad_input, call


@pytest.mark.parametrize(("words", "says"), [
    (("--hosts", "0"), "hosts must be a whole number, 1 or more, not 0"),
    (("--hosts", "65"), "hosts must be 64 or less, not 65"),
    (("--hosts", "4", "--racks", "3"), "4 hosts can't be shared evenly by 3 racks"),
    (("--bandwidth", "0"), "bandwidth_Bps must be a number above 0, and finite, not 0.0"),
    (("--uplink", "fast"), "'fast' is not a bandwidth"),
    (("--timeout", "-1"), "timeout must be a number above 0, and finite, not -1.0"),
])
def test_bad_input_is_refused_in_a_sentence(words: tuple[str, ...], says: str) -> None:
    assert_bad_input(call("testbed", *words, "true"), f"dtlab: {says}")


def test_a_system_that_makes_no_testbed_says_why(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtlab.testbed._TOOLS", {})
    (tmp_path / "unshare").write_text("#!/bin/sh\necho 'unshare failed: not permitted' >&2; exit 1")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert_bad_input(call("testbed", "true"),
                     "refuses the namespaces of a testbed (unshare failed: not permitted)")
    monkeypatch.setattr("dtlab.testbed._TOOLS", {"no-ip": "iproute2"})
    assert_bad_input(call("testbed", "true"),
                     "dtlab: a testbed needs the command 'no-ip'; install iproute2\n")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert_bad_input(call("testbed", "true"), "this system is not Linux")
