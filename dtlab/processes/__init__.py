"""Real processes: `run`, `Session`, and the communicator over torch.distributed.

    run              one function, N processes; session: ranks that stay; magic: %%ranks
    launcher         starts a group of ranks and serves it; rank_monitor: one rank, and which
                     failure counts; watchdog: can the run still go on?
    fork_server      forks ranks from one process that has torch loaded (fork_server_main)
    rank_main        what a rank's process does; process_group: how it joins the others
    communicator     Comm over torch.distributed (nccl_communicator: between GPUs), composed of:
      match_check      does a message fit its receive?
      message          one side of one message; object_frames: objects as messages
      transport        moves bytes, over Gloo or NCCL; same_host_transport: out of the sender's
                       memory
      status_writer    says what the rank does in the shared_status
      recorder         takes down the trace
      streams          threads that run what `begin` begins
      endpoint         what the communicators of one rank share
    failures         exceptions on their way from a rank (calls and results: ranks.serialization)
    control_channel  frames between launcher and ranks; store: the ranks' addresses
    joined           the communicator over a process group that a script has formed
    torchrun         ranks that torchrun has started; hosts: same versions, and their clocks;
                     monitor: watches over ranks that have no launcher of ours
"""

from dtlab.processes.joined import from_process_group
from dtlab.processes.run import run
from dtlab.processes.session import Session

__all__ = ["Session", "from_process_group", "run"]
