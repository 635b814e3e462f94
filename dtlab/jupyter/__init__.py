"""The additions of dtlab to Jupyter: pictures keep their alt texts.

`labextension/` for JupyterLab, which drops them; `template/` for nbconvert's HTML, which says "No
description", with the configuration that makes it the default of this environment.
"""
