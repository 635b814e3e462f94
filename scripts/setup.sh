#!/bin/sh
# Find a Python that is new enough and let scripts/setup.py build .venv with it.
# PYTHON=/path/to/python3.12 overrides the search.
cd "$(dirname "$0")/.." || exit 1

new_enough() {
    "$1" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

if [ -n "$PYTHON" ]; then
    if ! command -v "$PYTHON" >/dev/null 2>&1; then
        echo "There is no Python at PYTHON=$PYTHON; name one of version 3.11 or newer." >&2
        exit 1
    fi
    candidates=$PYTHON
else
    candidates="python3.13 python3.12 python3.11 python3 python3.14 python"
fi

for candidate in $candidates; do
    if new_enough "$candidate"; then
        exec "$candidate" -I -S scripts/setup.py
    fi
done

for candidate in $candidates; do
    if found=$("$candidate" -c 'import sys; print(sys.version.split()[0])' 2>/dev/null); then
        echo "dtlab needs Python 3.11 or newer, and $candidate is $found; install a newer one," \
            "or name it: make ${MAKECMDGOALS:-setup} PYTHON=/path/to/python3.12" >&2
        exit 1
    fi
done
echo "dtlab needs Python 3.11 or newer, and none is installed; install it (Debian, Ubuntu:" \
    "apt install python3 python3-venv; macOS: brew install python@3.12) and try again." >&2
exit 1
