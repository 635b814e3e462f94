"""Real processes: `run`, `Session`, and the communicator over torch.distributed.

    run           one function, N processes; session: ranks that stay; magic: %%ranks
    launcher      starts a crew of ranks and attends to it; verdict: who is to blame when it fails;
                  watchdog: can it still go on?
    server        forks ranks from one process that has torch loaded
    rank          what a rank's process does; group: how it joins the others
    communicator  the messages, over Gloo (nccl: over NCCL); messages: one side of one message;
                  lane, relay: the short way; endpoint: what a rank's communicators share
    board         shared memory: who waits for what; ledger: what was posted, and does it fit?
    shelf         shared memory for tensors that need not travel; post: letters of one host
    transfer      functions, arguments and results on their way; failures: exceptions on theirs;
                  luggage: algorithms that a learner has registered
    wire, store   small frames between launcher and ranks; the ranks' address book
    torchrun      ranks that someone else started
"""

from dtlab.processes.run import run
from dtlab.processes.session import Session

__all__ = ["Session", "run"]
