"""Real processes: `run`, `Session`, and the communicator over torch.distributed.

    server        forks ranks from one process that has torch loaded
    launcher      starts a crew of ranks, attends to it, says what went wrong
    rank          what a rank's process does
    communicator  the messages, over Gloo; endpoint: what a rank's communicators share
    board         shared memory: who waits for what; ledger: what was posted; watchdog: reads it
    transfer      functions, arguments and results on their way; wire: small frames and open files
    session       ranks that stay; magic: %%ranks; torchrun: ranks that others started
"""

from dtlab.processes.run import run
from dtlab.processes.session import Session

__all__ = ["Session", "run"]
