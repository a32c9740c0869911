"""Errors by the boundary they crossed. Entry points print the message alone and exit with status 1.

CusearchError
├── ConfigError            the config or the command line, or what they name, cannot work
│   └── ContractMismatch   this process disagrees with the run about what the run is
├── RunInUse               other processes work on the run, or in its folder
├── BufferUnavailable      Redis cannot be reached, or refuses us
├── BufferLost             Redis has lost or spoiled what it had acknowledged
├── Fenced                 another learner has taken over this run
├── CorruptPayload         bytes from Redis are no trajectory of ours
├── Stalled                nothing has moved for run.stall_s
├── InvalidTrajectory      a trajectory that nothing may be learned from; also a ValueError
├── NonFiniteUpdate        the update of a step holds NaN or infinity; it was not made
├── RetrievalUnavailable   the retriever failed; not to be confused with finding nothing
├── SearchRefused          the retriever answers others, and this one search never
├── SearchFailed           within the retriever: its engine failed; not to be confused with finding nothing
├── EpisodeFailed          one episode cannot be played, because of its own data
├── EngineDied             vLLM's engine process ended by itself
├── WriteFailed            a file of the run cannot be written: disk full, read-only, gone
├── WeightsUnavailable     a published version is missing or torn
├── WeightsMismatch        the engine does not compute what the learner computes
└── ProcessDied            a process of the run ended by itself
"""


class CusearchError(Exception):
    pass


class ConfigError(CusearchError):
    pass


class ContractMismatch(ConfigError):
    pass


class RunInUse(CusearchError):
    pass


class BufferUnavailable(CusearchError):
    pass


class BufferLost(CusearchError):
    pass


class Stalled(CusearchError):
    pass


class Fenced(CusearchError):
    pass


class CorruptPayload(CusearchError):
    pass


class InvalidTrajectory(CusearchError, ValueError):
    pass


class NonFiniteUpdate(CusearchError):
    pass


class RetrievalUnavailable(CusearchError):
    pass


class SearchRefused(CusearchError):
    pass


class SearchFailed(CusearchError):
    """`status` is the HTTP status that the retriever answers with."""

    def __init__(self, message: str, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


class EpisodeFailed(CusearchError):
    pass


class EngineDied(CusearchError):
    pass


class WriteFailed(CusearchError):
    pass


class WeightsUnavailable(CusearchError):
    pass


class WeightsMismatch(CusearchError):
    pass


class ProcessDied(CusearchError):
    pass


def first_line(error: Exception) -> str:
    """What an error says, without the lines that libraries put below; its type when it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
