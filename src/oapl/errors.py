"""The errors a user can meet: each says what is wrong, the value, where, and what to do."""


class OaplError(Exception):
    """Base of every error that a user can mend; the command line prints it without a traceback."""


class ConfigError(OaplError, ValueError):
    """A recipe or an option that cannot be run as written."""


class ModelError(OaplError):
    """A model or tokenizer that cannot be loaded or used."""


class TaskError(OaplError, ValueError):
    """A dataset or reward function that does not fit its task."""


class GradingError(OaplError):
    """A group whose completions got no valid reward. The group is recorded as failed, with this cause."""


class StoreError(OaplError):
    """A run folder, or a file in it, that is missing, damaged, locked or cannot be written."""


class ExchangeError(OaplError, ValueError):
    """A file of completions from elsewhere that cannot become rounds, or a round that cannot become such a file."""


class EngineError(OaplError):
    """An engine that cannot hold a policy, or whose log-probs do not match the policy's probe."""


class PolicyLostError(EngineError):
    """An engine that no longer holds the policy it was given, as a server that was started anew. It can be loaded
    again; what it made since is not the policy's."""


class InstallationError(OaplError):
    """Packages that do not fit together."""


class WorkerError(OaplError):
    """A process of the run that ended before its work was done."""


class LostRankError(WorkerError):
    """A rank of the trainer that ended because another did, whose own error is the cause."""


class CollapseError(OaplError):
    """A run that is losing its right answers. It was stopped, and an earlier policy is still good."""


class TrainingError(OaplError):
    """An optimizer step that cannot be taken. The last checkpoint stands."""
