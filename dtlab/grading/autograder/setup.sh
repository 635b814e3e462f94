#!/bin/sh
# Gradescope runs this once, as root, when it builds the autograder's image (Ubuntu 24.04 or newer,
# for Python 3.11 or newer).
set -e
root=${AUTOGRADER_ROOT:-/autograder}

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq bubblewrap libseccomp2 python3-venv
python3 -m venv "$root/venv"
"$root/venv/bin/python" -m pip install --quiet --constraint "$root/source/constraints.txt" "$root/source"

# What a submission must not read, should it have to run as nobody rather than in bubblewrap.
chmod -R go-rwx "$root/source"
chmod -R go-rwx "$("$root/venv/bin/python" -I -c 'from dtlab.grading import isolation as i; print(i.PACKAGE)')/grading/exercises"
