"""What `dtlab lab` wants of JupyterLab; read after a user's own configuration, so that it wins."""

import os

c = get_config()  # type: ignore[name-defined]  # noqa: F821  # Jupyter's

# This machine only, with a token: a notebook can do what its user can do.
c.ServerApp.ip = "127.0.0.1"
c.ServerApp.allow_remote_access = False
c.IdentityProvider.token = os.environ["JUPYTER_TOKEN"]
c.PasswordIdentityProvider.hashed_password = ""
# Neither news nor the panels of nbgrader, which are for teachers.
c.LabApp.news_url = None
c.ServerApp.tornado_settings = {
    "page_config_data": {"disabledExtensions": {"@jupyter/nbgrader": True}}
}
