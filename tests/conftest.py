"""What all tests share: the browser, a folder for artifacts, and who may run beside whom."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# The machine may be slow or busy: no example fails for the time it took.
settings.register_profile(
    "dtlab", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("dtlab")


def pytest_configure(config: pytest.Config) -> None:
    # Registered by hand, because a conftest speaks only for the tests beneath its own folder, and
    # these rules hold for notebooks/ too.
    config.pluginmanager.register(Beside(config), "dtlab-beside")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


class Beside:
    """Who may run beside whom: a test marked `alone` waits until no worker runs another one.

    A lock between the workers of one run, shared by most tests and exclusive for some. Whoever
    enters the room passes the door one at a time; someone who wants to be alone waits inside the
    door, so nobody overtakes him.
    """

    def __init__(self, config: pytest.Config):
        self.is_worker = hasattr(config, "workerinput")
        if not self.is_worker:  # the first process names the locks; its workers inherit the name
            folder = ROOT / ".pytest_cache"
            folder.mkdir(exist_ok=True)
            os.environ["DTLAB_TEST_LOCK"] = str(folder / f"beside-{os.getpid()}")
        self.path = os.environ["DTLAB_TEST_LOCK"]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if not self.is_worker:
            return (yield)
        mode = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
        with open(self.path + ".room", "w") as room:
            with open(self.path + ".door", "w") as door:
                fcntl.flock(door, fcntl.LOCK_EX)
                fcntl.flock(room, mode)
            return (yield)

    def pytest_unconfigure(self) -> None:
        if not self.is_worker:
            for end in (".room", ".door"):
                Path(self.path + end).unlink(missing_ok=True)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chrome or Chromium. Without one the test is skipped, or fails if it must run."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if found := shutil.which(name):
            return found
    if os.environ.get("DTLAB_REQUIRE_BROWSER") == "1":
        pytest.fail("DTLAB_REQUIRE_BROWSER=1, and there is no chromium: apt install chromium")
    pytest.skip("no chromium: apt install chromium")


@pytest.fixture(scope="session")
def artifacts() -> Path:
    """A folder for what people may want to look at after the tests: screenshots, traces."""
    folder = ROOT / "artifacts"
    folder.mkdir(exist_ok=True)
    return folder
