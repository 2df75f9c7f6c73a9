"""What can go wrong in a training process.

TrainkitError
├── InvalidSetup         an argument is wrong, or two do not go together; raised before training
├── InvalidData          the data yields what cannot be trained on, or cannot resume where the run was
├── InvalidStep          `training_step` or `evaluation_step` returned what the loop cannot use
├── NonFiniteLoss        the loss or a gradient is not a number, and the policy is to stop
├── OutOfMemory          the step does not fit, also after the recovery that was asked for
├── Desynchronized       processes hold different weights; names rank and parameter
├── CheckpointError
│   ├── DamagedCheckpoint    a file is missing, too short, or its checksum differs
│   └── WrongCheckpoint      it belongs to another model, optimizer or data
└── Interrupted          SIGTERM ended the run after its last checkpoint
"""

from __future__ import annotations


class TrainkitError(Exception):
    """The root of all errors that trainkit raises by itself."""


class InvalidSetup(TrainkitError, ValueError):
    """An argument is wrong, or two of them do not go together."""


class InvalidData(TrainkitError, ValueError):
    """The data yields what cannot be trained on, or cannot resume where the run was."""


class InvalidStep(TrainkitError):
    """A step of the user's module returned what the loop cannot use."""


class NonFiniteLoss(TrainkitError):
    """The loss or a gradient is not a finite number."""


class OutOfMemory(TrainkitError):
    """A step does not fit into memory."""


class Desynchronized(TrainkitError):
    """Processes that should hold the same weights do not."""


class CheckpointError(TrainkitError):
    """A checkpoint cannot be used."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, too short, or has other bytes than when it was written."""


class WrongCheckpoint(CheckpointError):
    """A checkpoint belongs to another model, optimizer or data."""


class Interrupted(TrainkitError):
    """The process was asked to end; what was done is in a checkpoint."""
