"""All errors of the project, by the boundary where they occur. Entry points print only the message; the status is 1.

CusearchError
├── ConfigError            the config or the command line is wrong, or a file or service it names cannot be used
│   ├── ContractMismatch   the settings or data of this process differ from the run contract
│   └── MissingExtra       a package that only an extra of this one installs is not installed
├── RunInUse               other processes use the run or its folder
├── RunBufferError         about the run's buffer
│   ├── BufferUnavailable  Redis cannot be reached, or refuses the connection
│   ├── BufferLost         Redis has lost or damaged data that it had acknowledged
│   ├── Fenced             another learner has taken over this run
│   └── CorruptPayload     bytes from Redis are not a valid trajectory
├── Stalled                no progress for run.stall_s
├── RanksFailed            the learner's ranks wait for one that does not arrive
├── InvalidTrajectory      a trajectory that must not be trained on; also a ValueError
├── NonFiniteUpdate        the update of a step contains NaN or infinity; it was not applied
├── RetrievalError         a search that has no results because of an error
│   ├── RetrievalUnavailable   the retriever failed
│   ├── SearchRefused      the retriever answers other searches, but not this one
│   └── SearchFailed       in the retriever process: its engine failed
├── EpisodeFailed          one episode cannot be played, because of its own data
├── MethodFailed           a selection method gave what is no selection, or no advantages, for its pool
├── NothingLearned         a run that cannot learn: all episodes of a pool failed, or no trajectory had an advantage
├── EngineDied             vLLM's engine process has ended unexpectedly
├── WriteFailed            a file of the run cannot be written: disk full, read-only, or the folder is gone
├── WeightsError           about a published weight version
│   ├── WeightsUnavailable it is missing or damaged
│   └── WeightsMismatch    the engine that loaded it computes other log-probabilities than the learner
├── ProcessDied            a process of the run has ended unexpectedly
├── ReplayDiffers          a recorded step is not what it would be now
├── StudyIncomplete        a study has runs that are to do, or that failed
└── JudgeFailed            the judge of an evaluation fails, or says neither yes nor no
"""

from collections import abc
from contextlib import contextmanager


class CusearchError(Exception):
    pass


class ConfigError(CusearchError):
    pass


class ContractMismatch(ConfigError):
    pass


class MissingExtra(ConfigError):
    pass


class RunInUse(CusearchError):
    pass


class RunBufferError(CusearchError):
    pass


class BufferUnavailable(RunBufferError):
    pass


class BufferLost(RunBufferError):
    pass


class Stalled(CusearchError):
    pass


class RanksFailed(CusearchError):
    pass


class Fenced(RunBufferError):
    pass


class CorruptPayload(RunBufferError):
    pass


class InvalidTrajectory(CusearchError, ValueError):
    pass


class NonFiniteUpdate(CusearchError):
    pass


class RetrievalError(CusearchError):
    pass


class RetrievalUnavailable(RetrievalError):
    pass


class SearchRefused(RetrievalError):
    pass


class SearchFailed(RetrievalError):
    """`status` is the HTTP status that the retriever answers with."""

    def __init__(self, message: str, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


class EpisodeFailed(CusearchError):
    pass


class MethodFailed(CusearchError):
    pass


class NothingLearned(CusearchError):
    pass


class EngineDied(CusearchError):
    pass


class WriteFailed(CusearchError):
    pass


class WeightsError(CusearchError):
    pass


class WeightsUnavailable(WeightsError):
    pass


class WeightsMismatch(WeightsError):
    pass


class ProcessDied(CusearchError):
    pass


class ReplayDiffers(CusearchError):
    pass


class StudyIncomplete(CusearchError):
    pass


class JudgeFailed(CusearchError):
    pass


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its type when the message is empty."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


@contextmanager
def packages_of(extra: str) -> abc.Iterator[None]:
    """Wraps the imports of packages that only `extra` installs. Raises: MissingExtra, which names it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise MissingExtra(f"{package} is not installed: pip install 'cusearch-async[{extra}]'") from error
