"""All errors of the project, by the boundary where they occur."""

from collections import abc
from contextlib import contextmanager


class CusearchError(Exception):
    """Entry points print only the message; the status is 1."""


class ConfigError(CusearchError):
    """The config or the command line is wrong, or a file or service it names cannot be used."""


class ContractMismatch(ConfigError):
    """The settings or data of this process differ from the run contract."""


class MissingExtra(ConfigError):
    """A package that only an extra of this one installs is not installed."""


class RunInUse(CusearchError):
    """Other processes use the run or its folder."""


class BufferUnavailable(CusearchError):
    """Redis cannot be reached, or refuses the connection."""


class BufferLost(CusearchError):
    """Redis has lost or damaged data that it had acknowledged."""


class Stalled(CusearchError):
    """No progress for run.stall_s."""


class RanksFailed(CusearchError):
    """The learner's ranks wait for one that does not arrive."""


class Fenced(CusearchError):
    """Another learner has taken over this run."""


class CorruptPayload(CusearchError):
    """Bytes from Redis are not a valid trajectory."""


class InvalidTrajectory(CusearchError, ValueError):
    """A trajectory that must not be trained on; also a ValueError."""


class NonFiniteUpdate(CusearchError):
    """The update of a step contains NaN or infinity; it was not applied."""


class RetrievalError(CusearchError):
    """A search that has no results because of an error."""


class RetrievalUnavailable(RetrievalError):
    """The retriever failed."""


class SearchRefused(RetrievalError):
    """The retriever answers other searches, but not this one."""


class SearchFailed(RetrievalError):
    """In the retriever process: its engine failed. `status` is the HTTP status of its answer, `retry_after_s` the pause
    that it asks for."""

    def __init__(self, message: str, status: int = 502, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s


class EpisodeFailed(CusearchError):
    """One episode cannot be run, because of its own data."""


OF_ONE_EPISODE: dict[type[Exception], str] = {
    TimeoutError: "timeout",
    SearchRefused: "search",
    EpisodeFailed: "episode",
    InvalidTrajectory: "trajectory",
}
"""Errors, and those derived from them, that fail one episode only, which is tried again -> their names in a worker's
heartbeat."""


class MethodFailed(CusearchError):
    """A selection method returned an invalid selection, or invalid advantages, for its pool."""


class NothingLearned(CusearchError):
    """A run that cannot learn: all episodes of a pool failed, or no trajectory had an advantage."""


class StoppedByAlarm(CusearchError):
    """An alarm fires that is to end the run."""


class EngineDied(CusearchError):
    """VLLM's engine process has ended unexpectedly."""


class WriteFailed(CusearchError):
    """A file of the run cannot be written: disk full, read-only, or the folder is gone."""


class ObjectsUnavailable(CusearchError):
    """An object store cannot be read."""


class WeightsUnavailable(CusearchError):
    """It is missing or damaged."""


class LearnerUnreachable(WeightsUnavailable):
    """The learner that serves it does not answer."""


class WeightsMismatch(CusearchError):
    """The engine that loaded it computes other log-probabilities than the learner."""


class ProcessDied(CusearchError):
    """A process of the run has ended unexpectedly."""


class ReplayDiffers(CusearchError):
    """A recorded step computes something else now."""


class StudyIncomplete(CusearchError):
    """A study has runs that are not done, or that failed."""


class JudgeFailed(CusearchError):
    """The judge of an evaluation fails, or answers neither yes nor no."""


class TrackerFailed(CusearchError):
    """A tracker did not get everything of a run."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its type when the message is empty."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def hub_reason(error: BaseException) -> str:
    """What huggingface_hub says below the status line, with which its messages begin."""
    from huggingface_hub.errors import RepositoryNotFoundError  # noqa: PLC0415  (slow to import, and seldom needed)

    status, *lines = [line for line in map(str.strip, str(error).splitlines()) if line] or [""]
    reason = " ".join(lines[:2]) if lines and "Error" in status else first_line(error)
    advice = "; log in with `hf auth login`, or set HF_TOKEN" if isinstance(error, RepositoryNotFoundError) else ""
    return reason + advice


@contextmanager
def packages_of(extra: str) -> abc.Iterator[None]:
    """Wraps the imports of packages that only `extra` installs. Raises: MissingExtra, which names it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise MissingExtra(f"{package} is not installed: pip install 'cusearch-async[{extra}]'") from error
