#!/bin/bash
# Several hosts over plain ssh: docs/launch/ssh.sh "node1 node2" my_lesson.py
# Before: a key for ssh to each host, and this folder, with its .venv, at the same path on all.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 \"host1 host2 …\" script.py [argument …]" >&2
    exit 2
fi
read -ra hosts <<< "$1"
shift

# The first host is where all meet: the others must reach it by this name, at this port.
port=29500
command=(.venv/bin/torchrun --nnodes "${#hosts[@]}" --nproc-per-node 2
         --rdzv-backend c10d --rdzv-endpoint "${hosts[0]}:$port" --rdzv-id "ssh-$$" "$@")

# -tt gives each torchrun a terminal: when this script is interrupted, so are they.
pids=()
for host in "${hosts[@]}"; do
    (ssh -tt "$host" "cd $(printf %q "$PWD") && $(printf '%q ' "${command[@]}")" < /dev/null \
        | sed -u "s/^/[$host] /") &
    pids+=($!)
done

# Failed if one has failed.
failed=0
for pid in "${pids[@]}"; do
    wait "$pid" || failed=1
done
exit "$failed"
