"""JupyterLab's settings for `dtlab lab`; read after a user's own, so that these win."""

import os
import warnings

import zmq

c = get_config()  # type: ignore[name-defined]  # noqa: F821  # Jupyter's

# This machine only, with a token: a notebook can do what its user can do.
c.ServerApp.ip = "127.0.0.1"
c.ServerApp.allow_remote_access = False
c.IdentityProvider.token = os.environ["JUPYTER_TOKEN"]
c.PasswordIdentityProvider.hashed_password = ""


# What it writes into the terminal: errors. nbgrader's part of the server is for teachers.
c.LabApp.log_level = "ERROR"
if zmq.has("curve"):
    c.KernelManager.transport_encryption = "auto"
c.ServerApp.jpserver_extensions = {
    f"nbgrader.server_extensions.{name}": False
    for name in ("formgrader", "validate_assignment", "assignment_list", "course_list")}
warnings.filterwarnings("ignore", "Overriding existing pre_save_hook")  # Jupyter sets it twice

HIDDEN = ["@jupyter/nbgrader", "@jupyterlab/apputils-extension:announcements"]


def of_the_course(handler, page):  # type: ignore[no-untyped-def]
    """The page's configuration, without nbgrader's panels, which are for teachers, and the news;
    our extension sees in it that this is the course."""
    return page | {"disabledExtensions": [*page.get("disabledExtensions", []), *HIDDEN],
                   "dtlab": True}


c.ServerApp.tornado_settings = {"page_config_hook": of_the_course}


def without_views(model, **_):  # type: ignore[no-untyped-def]
    """Save widgets as their still pictures: on opening the file again, no kernel knows them."""
    if model["type"] == "notebook" and model["content"]:
        for cell in model["content"]["cells"]:
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):
                    output["data"].pop("application/vnd.jupyter.widget-view+json", None)


c.FileContentsManager.pre_save_hook = without_views
